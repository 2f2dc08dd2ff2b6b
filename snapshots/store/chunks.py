"""The folder of chunk files: written aside, durable before they get their name, checked whenever they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from snapshots.store.disk import Disk
from snapshots.store.errors import damaged_chunk
from snapshots.store.frames import FRAME_BYTES_MAX, FrameInvalidError, chunk_name, decode, encode


class ChunkFiles:
    """Chunks by name. Not locked by itself: the store holds the lock."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._folder = root / "chunks"
        self._incoming = root / "incoming"
        self._disk = disk

    def sizes(self) -> dict[str, int]:
        """Name → bytes of its file, of every chunk there is."""
        with os.scandir(self._folder) as entries:
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}

    def write(self, chunks: Sequence[tuple[str, bytes]]) -> dict[str, int]:
        """Store chunks that are not there yet; :meth:`sync` makes their names durable.

        Returns:
            Name → bytes of its file.

        Raises:
            OSError: none of them may be relied on.
        """
        framed = {name: encode(data) for name, data in chunks}
        self._disk.write_all([(self._incoming / name, frame) for name, frame in framed.items()])
        for name in framed:
            self._disk.rename(self._incoming / name, self._folder / name)
        return {name: sum(len(part) for part in frame) for name, frame in framed.items()}

    def sync(self) -> None:
        """Make the names of all chunks written so far durable."""
        self._disk.sync_folder(self._folder)

    def read(self, name: str) -> bytes:
        """The content of a chunk, re-hashed.

        Raises:
            StoreError: ``snapshot.chunk_damaged``: missing, malformed, or not what its name says.
        """
        try:
            data = decode(self._disk.read(self._folder / name, FRAME_BYTES_MAX))
        except FileNotFoundError as error:
            raise damaged_chunk(name, "its file is missing") from error
        except FrameInvalidError as error:
            raise damaged_chunk(name, str(error)) from error
        if chunk_name(data) != name:
            raise damaged_chunk(name, "its content does not match its name")
        return data

    def remove(self, names: Iterable[str]) -> None:
        """Delete chunks that nothing names any more. Not made durable: one that comes back is swept again."""
        for name in names:
            self._disk.unlink(self._folder / name)
