"""Writing files of a build: copy, link, create; each one synced and read-only when it is done."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from patchctl.atomic import fsync_dir

# Nobody, not even the engine, may write to a file that another build may share through a hard link.
FILE_MODE: Final = 0o444
FOLDER_MODE: Final = 0o755
_COPY_BYTES: Final = 64 << 20
_BLOCK_BYTES: Final = 1 << 20
_CANNOT_COPY_IN_KERNEL = frozenset((errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM))
_CANNOT_LINK = frozenset((errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP))


@contextlib.contextmanager
def creating(path: Path) -> Iterator[int]:
    """A new file's descriptor; on leaving it is read-only and synced. Parents are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
        os.fchmod(fd, FILE_MODE)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """A descriptor to read a file with; a symbolic link is refused, a FIFO does not wait."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def write_file(path: Path, content: bytes) -> None:
    """Create a file with ``content``."""
    with creating(path) as fd:
        pwrite_all(fd, content, 0)


def copy_file(source: Path, target: Path) -> None:
    """Create ``target`` with the bytes of ``source``."""
    with reading(source) as source_fd, creating(target) as target_fd:
        copy_range(source_fd, 0, target_fd, os.fstat(source_fd).st_size)


def seal_file(path: Path) -> None:
    """Make a file that came by a link read-only and durable; what is no plain file is left alone and refused.

    Raises:
        OSError: a symbolic link (through which the mode of a foreign file would change), or no plain file.
    """
    with reading(path) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        os.fchmod(fd, FILE_MODE)
        os.fsync(fd)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link where the filesystem and its rules allow it, else copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        copy_file(source, target)


def copy_range(source_fd: int, source_offset: int, target_fd: int, size_bytes: int) -> None:
    """Copy ``size_bytes`` to the start of ``target_fd``; in the kernel, or by sharing extents, where possible.

    A source that ends early leaves a short target: whoever copies also verifies.
    """
    done = 0
    while done < size_bytes:
        wanted = min(_COPY_BYTES, size_bytes - done)
        try:
            copied = os.copy_file_range(source_fd, target_fd, wanted, source_offset + done, done)
        except OSError as error:
            if error.errno not in _CANNOT_COPY_IN_KERNEL:
                raise
            copied = 0
        # Some filesystems answer 0 instead of an error, so 0 also means: copy by hand.
        copied = copied or pwrite_all(target_fd, os.pread(source_fd, _BLOCK_BYTES, source_offset + done)[:wanted], done)
        if not copied:
            return
        done += copied


def pwrite_all(fd: int, content: bytes, offset: int) -> int:
    """Write all of ``content`` at ``offset``; returns its length."""
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
    return len(content)


def sync_folders(root: Path) -> None:
    """Make every name below and in ``root`` durable, and folders readable for the engine's user."""
    for folder in (*(path for path in root.rglob("*") if path.is_dir()), root):
        folder.chmod(FOLDER_MODE)
        fsync_dir(folder)
