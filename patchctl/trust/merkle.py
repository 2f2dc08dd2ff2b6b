"""RFC 6962 (section 2.1) Merkle tree over log entries: roots and inclusion proofs. Pure."""

from __future__ import annotations

import hashlib


def leaf_hash(entry: bytes) -> bytes:
    """32-byte hash of one log entry; the prefix keeps leaves and nodes apart."""
    return hashlib.sha256(b"\x00" + entry).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class MerkleTree:
    """An append-only tree.

    ``_levels[k][i]`` is the hash of the complete subtree over leaves ``[i * 2**k, (i + 1) * 2**k)``: an append
    costs two hashes on average, and a root or proof O(log n) hashes.
    """

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: list[list[bytes]] = [[]]

    def __len__(self) -> int:
        return len(self._levels[0])

    def append(self, entry: bytes) -> int:
        """Add one entry; returns its index."""
        self._levels[0].append(leaf_hash(entry))
        level = 0
        while len(self._levels[level]) % 2 == 0:
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1].append(_node(*self._levels[level][-2:]))
            level += 1
        return len(self) - 1

    def root(self, size: int | None = None) -> bytes:
        """Root hash of the first ``size`` entries (default: all), 32 bytes.

        Raises:
            ValueError: the tree has fewer entries.
        """
        size = len(self) if size is None else size
        if not 0 <= size <= len(self):
            raise ValueError(f"no root for {size} entries, the tree has {len(self)}")
        return self._hash(0, size) if size else hashlib.sha256(b"").digest()

    def inclusion_proof(self, index: int, size: int | None = None) -> list[bytes]:
        """Sibling hashes, leaf to root, proving entry ``index`` under ``root(size)``.

        Raises:
            ValueError: ``index`` is not among the first ``size`` entries, or the tree has fewer.
        """
        size = len(self) if size is None else size
        if not 0 <= index < size <= len(self):
            raise ValueError(f"no proof of entry {index} among {size}, the tree has {len(self)}")
        low, high = 0, size
        path: list[bytes] = []
        while high - low > 1:
            middle = low + _split(high - low)
            if index < middle:
                path.append(self._hash(middle, high))
                high = middle
            else:
                path.append(self._hash(low, middle))
                low = middle
        return path[::-1]

    def _hash(self, low: int, high: int) -> bytes:
        width = high - low
        if width & (width - 1) == 0:
            return self._levels[width.bit_length() - 1][low // width]
        middle = low + _split(width)
        return _node(self._hash(low, middle), self._hash(middle, high))


def _split(width: int) -> int:
    """The largest power of two below ``width``."""
    return 1 << ((width - 1).bit_length() - 1)
