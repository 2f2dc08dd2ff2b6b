"""For tests: snapshots with stored tensors, and a disk that crashes, loses what was not synced, or is full."""

from __future__ import annotations

import errno
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from snapshots.model import GenerationState, HostSnapshot, PageSet, ProcessSnapshot, Region, TensorState
from snapshots.store.disk import Disk, Parts
from snapshots.store.store import SnapshotStore, Stored
from snapshots.store.writer import TensorSource

PIECE_BYTES = 64


class CrashError(BaseException):
    """Power is lost; nothing that runs afterwards reaches the disk."""


def sample_snapshot(tensors: Mapping[str, bytes], *, taken_unix_ns: int, pages: bytes = b"") -> HostSnapshot:
    """One generation with ``tensors``, one process with one region of ``pages`` (8 bytes a page digest)."""
    states = {
        name: TensorState(xxhash.xxh3_128_hexdigest(data), "uint8", (len(data),)) for name, data in tensors.items()
    }
    numbers = b"".join(number.to_bytes(8, "little") for number in range(len(pages) // 8))
    region = Region(
        0x1000, 0x9000, "rw-p", "anon", "", 4096, 4096, "page_hash", "conservative", PageSet(numbers, pages), "by test"
    )
    process = ProcessSnapshot("engine", 7, 99, 4096, 4096, 4096, (region,))
    return HostSnapshot(taken_unix_ns, 1, (GenerationState(1, "sha256:b", states),), {"engine": process})


def sources_of(tensors: Mapping[str, bytes]) -> list[TensorSource]:
    """Sources that yield small pieces."""
    return [
        TensorSource(
            1,
            name,
            0x7000,
            xxhash.xxh3_128_hexdigest(data),
            len(data),
            lambda data=data: (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)),  # type: ignore[misc]
        )
        for name, data in tensors.items()
    ]


def add_sample(
    store: SnapshotStore, tensors: Mapping[str, bytes], *, at: int, transaction: str = "", pinned: Sequence[str] = ()
) -> Stored:
    """Store ``tensors`` as taken ``at`` seconds after the epoch."""
    snapshot = sample_snapshot(tensors, taken_unix_ns=at * 10**9, pages=at.to_bytes(8, "little"))
    return store.add(snapshot, sources_of(tensors), transaction=transaction, pinned=pinned)


def tensors_of(store: SnapshotStore, identifier: str) -> dict[str, bytes]:
    """The stored bytes of every tensor of a snapshot."""
    manifest = store.manifest(identifier)
    return {tensor.name: b"".join(store.read(tensor.content)) for tensor in manifest.contents}


class QuickDisk(Disk):
    """Makes nothing durable: for tests of what is stored, not of power loss."""

    def write_all(self, files: Sequence[tuple[Path, Parts]]) -> None:
        """See :class:`Disk`; one after the other, in order."""
        for path, parts in files:
            self.write(path, parts)

    def write(self, path: Path, parts: Parts) -> None:
        """See :class:`Disk`."""
        path.write_bytes(b"".join(parts))

    def sync_folder(self, folder: Path) -> None:
        """Nothing."""


class CrashingDisk(QuickDisk):
    """Counts operations and crashes before the ``crash_at``-th (from 0).

    What a power loss may undo is undone by :meth:`lose`: a file that was being written is cut or missing, renames
    and unlinks in a folder that was not synced since may not have happened.
    """

    def __init__(self, crash_at: int) -> None:
        self.operations: list[str] = []
        self._crash_at = crash_at
        self._unsynced: list[tuple[Path, Path | None, bytes]] = []
        self._half_written: Path | None = None

    def _step(self, name: str) -> None:
        if len(self.operations) >= self._crash_at:
            raise CrashError
        self.operations.append(name)

    def write(self, path: Path, parts: Parts) -> None:
        """See :class:`Disk`."""
        self._step(f"create {path.name}")
        super().write(path, parts)
        self._half_written = path
        self._step(f"sync {path.name}")
        self._half_written = None

    def rename(self, source: Path, target: Path) -> None:
        """See :class:`Disk`."""
        self._step(f"rename {target.name}")
        self._unsynced.append((target, source, b""))
        super().rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        """See :class:`Disk`."""
        self._step(f"sync {folder.name}")
        self._unsynced = [change for change in self._unsynced if change[0].parent != folder]

    def unlink(self, path: Path) -> None:
        """See :class:`Disk`."""
        self._step(f"unlink {path.name}")
        if path.exists():
            self._unsynced.append((path, None, path.read_bytes()))
        super().unlink(path)

    def lose(self, chance: random.Random) -> None:
        """What the power loss takes."""
        if self._half_written is not None:
            whole = self._half_written.read_bytes()
            self._half_written.write_bytes(whole[: chance.randint(0, len(whole))])
        for path, source, content in reversed(self._unsynced):
            if chance.random() < 0.5:  # noqa: PLR2004 - a coin
                continue
            if source is not None and path.exists():
                path.rename(source)
            elif source is None:
                path.write_bytes(content)


class FullDisk(QuickDisk):
    """Takes ``bytes_left`` more bytes; then a write fails half way, as on a full disk."""

    def __init__(self, bytes_left: int) -> None:
        self._bytes_left = bytes_left

    def write(self, path: Path, parts: Parts) -> None:
        """See :class:`Disk`."""
        data = b"".join(parts)
        if len(data) > self._bytes_left:
            path.write_bytes(data[: self._bytes_left])
            raise OSError(errno.ENOSPC, "No space left on device")
        self._bytes_left -= len(data)
        super().write(path, parts)
