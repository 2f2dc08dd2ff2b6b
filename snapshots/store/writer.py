"""Puts one snapshot's content into chunks: hashes everything, writes only what is not stored yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from snapshots.store.chunks import ChunkFiles
from snapshots.store.errors import StoreError
from snapshots.store.frames import chunk_name
from snapshots.store.manifest import Blob
from snapshots.tensor_chunks import CHUNK_BYTES, TensorHasher

# Chunks written and synced together: enough to keep the disk busy, and at most 32 MiB of memory.
_BATCH = 32


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where the bytes of one tensor come from.

    Attributes:
        address: where they lie in the process's memory.
        digest: of its bytes as they were just hashed, see :class:`snapshots.tensor_chunks.TensorHasher`.
        read: yields them in order, all pieces ``CHUNK_BYTES`` long but the last; a piece is valid until the next.
    """

    generation: int
    name: str
    address: int
    digest: str
    size_bytes: int
    read: Callable[[], Iterator[bytes | memoryview]]


class ContentWriter:
    """Writes the content of one snapshot. Counts what was new.

    Args:
        chunks: where to.
        sizes: the chunks that are stored; kept up to date.
        make_room: called before ``n`` bytes are written; raises when they may not be.
    """

    def __init__(self, chunks: ChunkFiles, sizes: dict[str, int], make_room: Callable[[int], None]) -> None:
        self._chunks = chunks
        self._sizes = sizes
        self._make_room = make_room
        self._pending: dict[str, bytes] = {}
        # Every chunk of the snapshot so far: none of them may be evicted to make room for it.
        self.named: set[str] = set()
        self.new: dict[str, int] = {}

    def tensor(self, source: TensorSource) -> Blob:
        """Store one tensor.

        Raises:
            StoreError: ``snapshot.tensor_changed``: its bytes are not those that were hashed.
        """
        hasher = TensorHasher()

        def hashed() -> Iterator[bytes | memoryview]:
            for piece in source.read():
                hasher.update(piece)
                yield piece

        blob = self.blob(hashed())
        if (blob.size_bytes, hasher.hexdigest()) != (source.size_bytes, source.digest):
            raise StoreError(
                "snapshot.tensor_changed",
                "the snapshot was not stored",
                f"tensor {source.name} of generation {source.generation} changed while it was read",
                "take it again; if it happens again, find what writes weights while they serve",
            )
        return blob

    def reuse(self, blob: Blob) -> Blob:
        """Name content that is stored already."""
        self.named.update(blob.chunks)
        return blob

    def blob(self, pieces: Iterable[bytes | memoryview]) -> Blob:
        """Store content given in pieces, all ``CHUNK_BYTES`` long but the last."""
        names: list[str] = []
        size_bytes = 0
        for piece in pieces:
            name = chunk_name(piece)
            names.append(name)
            size_bytes += len(piece)
            self.named.add(name)
            if name not in self._sizes and name not in self._pending:
                self._pending[name] = bytes(piece)
                if len(self._pending) == _BATCH:
                    self.flush()
        return Blob(size_bytes, tuple(names))

    def flush(self) -> None:
        """Write what is pending."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        self._make_room(sum(len(data) for data in pending.values()))
        # Listed before they exist: a failure half way must be able to remove what it left.
        self.new.update(dict.fromkeys(pending, 0))
        written = self._chunks.write(list(pending.items()))
        self.new.update(written)
        self._sizes.update(written)


def pieces_of(data: bytes | memoryview) -> Iterator[memoryview]:
    """Content in memory, in chunk-sized pieces."""
    view = memoryview(data)
    return (view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES))
