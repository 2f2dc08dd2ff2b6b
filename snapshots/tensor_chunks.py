"""Digests of a tensor by chunks of 1 MiB: hashed in parallel, and a change has a place. Pure.

The digest of the whole is taken over the digests of its chunks, so that a large tensor needs no sequential pass.
A tensor of at most one chunk has that chunk's digest: the xxh3_128 of its bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import xxhash

from snapshots.model import TensorState

# As large as the store's chunks; small enough that a changed row stands out, large enough that the interpreter lock
# is free while one is hashed (from 100 KB on, xxhash 4).
CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Digests of one tensor's bytes.

    Attributes:
        digest: 32 hex digits, of the whole.
        chunks: 16 bytes per chunk, packed in order; the last chunk may be shorter than the others.
    """

    digest: str
    chunks: bytes


def whole_digest(chunks: bytes) -> str:
    """The digest of a tensor, from those of its chunks."""
    if len(chunks) == DIGEST_BYTES:
        return chunks.hex()
    return xxhash.xxh3_128_hexdigest(chunks)


class TensorHasher:
    """The same digests from pieces of any length, in order: for whoever reads the bytes anyway."""

    def __init__(self) -> None:
        self._chunks = bytearray()
        self._open = xxhash.xxh3_128()
        self._room = CHUNK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            if not self._room:
                self._close()
            piece, view = view[: self._room], view[self._room :]
            self._open.update(piece)
            self._room -= len(piece)

    def digest(self) -> TensorDigest:
        """The digests of all bytes taken so far."""
        chunks = bytes(self._chunks) + self._open.digest()
        return TensorDigest(whole_digest(chunks), chunks)

    def hexdigest(self) -> str:
        """The digest of the whole."""
        return self.digest().digest

    def _close(self) -> None:
        self._chunks += self._open.digest()
        self._open = xxhash.xxh3_128()
        self._room = CHUNK_BYTES


def changed_chunks(before: TensorState, after: TensorState) -> tuple[int, ...] | None:
    """Indices of the chunks that differ; None where the two can't be compared chunk by chunk."""
    comparable = (before.shape, before.dtype, before.hash) == (after.shape, after.dtype, after.hash)
    if not comparable or not before.chunks or len(before.chunks) != len(after.chunks):
        return None
    return tuple(
        at // DIGEST_BYTES
        for at in range(0, len(before.chunks), DIGEST_BYTES)
        if before.chunks[at : at + DIGEST_BYTES] != after.chunks[at : at + DIGEST_BYTES]
    )


def rows_of_chunks(shape: tuple[int, ...], item_bytes: int, chunks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Rows (indices of the first dimension) that lie in ``chunks``, as merged ``[first, end)`` ranges.

    A row that straddles two chunks belongs to both, so rows beside a changed one may be named too: never fewer.

    Args:
        shape: of the tensor; a scalar has one row.
        item_bytes: size of an element.
        chunks: ascending.
    """
    rows = shape[0] if shape else 1
    row_bytes = math.prod(shape[1:]) * item_bytes
    if not rows or not row_bytes:
        return ()
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        first = chunk * CHUNK_BYTES // row_bytes
        end = min(rows, -(-(chunk + 1) * CHUNK_BYTES // row_bytes))
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((first, end))
    return tuple(ranges)
