"""Disk trouble, explained, and foreseen where it can be."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from patchctl.errors import ExitCode, PatchctlError

# Left free after any write: the journal and the logs live on the same disk and must go on.
RESERVE_BYTES: Final = 16 << 20
# One folder entry, inode and half a block lost, per file; ext4 and XFS use 4 KiB blocks.
_FILE_OVERHEAD_BYTES: Final = 4096
_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_WHAT = "The build was not stored; what was there before is untouched."


def require_space(folder: Path, needed_bytes: int, files: int) -> None:
    """Refuse early when writing ``needed_bytes`` into ``files`` files would fill the disk.

    Raises:
        PatchctlError: ``store.disk_short`` with the arithmetic.
    """
    overhead_bytes = files * _FILE_OVERHEAD_BYTES
    free_bytes = shutil.disk_usage(folder).free
    total_bytes = needed_bytes + overhead_bytes + RESERVE_BYTES
    if total_bytes > free_bytes:
        raise _disk_short(
            f"needed {needed_bytes} bytes of content + {overhead_bytes} for {files} files + {RESERVE_BYTES} reserve"
            f" = {total_bytes}, free {free_bytes}, short by {total_bytes - free_bytes}"
        )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn an ``OSError`` of a write into a refusal. The cleaning up happens inside, before it.

    Raises:
        PatchctlError: ``store.disk_short`` or ``store.io_failed``.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise _disk_short(f"the disk filled up while writing: {error.strerror}") from error
        raise PatchctlError(code="store.io_failed", what=_WHAT, why=str(error)) from error


def not_found(digest: str) -> PatchctlError:
    """The store has no such build."""
    return PatchctlError(
        code="store.not_found",
        what=f"The store has no build {digest}.",
        why="it was never stored, or it was removed",
        exit_code=ExitCode.NOT_FOUND,
    )


def build_damaged(why: str) -> PatchctlError:
    """A build is not what its digest says."""
    return PatchctlError(
        code="store.build_damaged",
        what="A build does not match its digest and must not be used.",
        why=why,
        exit_code=ExitCode.SIGNATURE,
    )


def _disk_short(why: str) -> PatchctlError:
    return PatchctlError(code="store.disk_short", what=_WHAT, why=why, exit_code=ExitCode.HELD)
