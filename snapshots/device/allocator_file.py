"""Allocator snapshots kept in files; reading one needs no torch and executes nothing."""

from __future__ import annotations

from pathlib import Path

from snapshots.device.allocator import AllocatorSnapshot, AllocatorSnapshotError, parse_allocator
from snapshots.device.pickles import PICKLE_BYTES_MAX, PickleRefusedError, load_plain


def load_allocator(path: Path) -> AllocatorSnapshot:
    """Read a file that ``torch.cuda.memory._dump_snapshot`` wrote.

    Raises:
        AllocatorSnapshotError: it is no such file, or not harmless.
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        raw = file.read(PICKLE_BYTES_MAX + 1)
    try:
        return parse_allocator(load_plain(raw))
    except PickleRefusedError as error:
        raise AllocatorSnapshotError(f"{path.name}: {error}") from error
