"""Shared mappings: what another process writes into them leaves no trace in this process's page tables.

So the memory behind them is read instead of their mapping: all of it, whoever touched it. It is opened through
``/proc/<pid>/map_files`` (CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE), by its path, or through a descriptor that the
process still holds; what opened must be the very file that is mapped.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from snapshots.capture import kernel
from snapshots.capture.vmas import Mapping

# Shared files beyond this are not read in full: 64 MiB take 5 ms from the page cache, and seconds from a slow disk.
_FILE_BYTES_MAX = 64 << 20
# Memory that is nothing but memory, whatever its size: no disk stands behind it.
_MEMORY_NAMES = ("/memfd:", "/dev/zero", "/dev/shm/", "/SYSV", "/anon_hugepage")  # noqa: S108 - names to compare with


def in_memory(mapping: Mapping) -> bool:
    """Whether the shared mapping has no file on a disk behind it."""
    return mapping.kind == "hugetlb" or mapping.name.startswith(_MEMORY_NAMES)


def readable_in_full(mapping: Mapping) -> bool:
    """Whether reading everything behind the mapping is bounded."""
    return in_memory(mapping) or mapping.end - mapping.start <= _FILE_BYTES_MAX


def _candidates(pid: int, mapping: Mapping) -> Iterator[str]:
    yield f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
    if mapping.name.startswith("/") and not mapping.name.endswith(" (deleted)"):
        yield f"/proc/{pid}/root{mapping.name}"
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - names only, no Path per descriptor
    except OSError:
        return
    yield from (f"/proc/{pid}/fd/{name}" for name in names)


def open_backing(pid: int, mapping: Mapping) -> int | None:
    """Open the file behind a shared mapping for reading; the caller closes it.

    Returns:
        The descriptor, or None where no way leads to it.
    """
    for path in _candidates(pid, mapping):
        try:
            found = os.stat(path)  # noqa: PTH116 - a path per descriptor of the process would cost more than the call
            if found.st_ino != mapping.inode or not stat.S_ISREG(found.st_mode):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        opened = os.fstat(fd)
        if (opened.st_ino, opened.st_dev) == (found.st_ino, found.st_dev) and stat.S_ISREG(opened.st_mode):
            return fd
        os.close(fd)
    return None


def data_offsets(fd: int, start: int, end: int) -> npt.NDArray[np.int64]:
    """Offsets of the pages in ``[start, end)`` of a file that hold data; holes read as zeros.

    Raises:
        OSError: the file can't be searched.
    """
    parts: list[npt.NDArray[np.int64]] = []
    page = kernel.PAGE_BYTES
    while start < end:
        try:
            data = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data beyond
                raise
            break
        hole = min(os.lseek(fd, data, os.SEEK_HOLE), end)
        if data >= end:
            break
        parts.append(np.arange(data // page * page, -(-hole // page) * page, page, dtype=np.int64))
        start = -(-hole // page) * page
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
