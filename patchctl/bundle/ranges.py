"""Reading byte ranges of open files in bounded memory.

``pread`` rather than ``mmap``: a mapped file that another process truncates kills the reader with
SIGBUS, and mapped pages count as its memory. A shared file descriptor's position is never used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Final

# Large enough that system calls cost nothing beside sha256, small enough to forget about memory.
BLOCK_BYTES: Final = 1 << 20


def read_range(fd: int, offset: int, size_bytes: int) -> Iterator[bytes]:
    """The bytes of a range in blocks of at most 1 MiB; ends early where the file does."""
    end = offset + size_bytes
    while offset < end and (block := os.pread(fd, min(BLOCK_BYTES, end - offset), offset)):
        yield block
        offset += len(block)


def range_sha256(fd: int, offset: int, size_bytes: int) -> str:
    """Hex sha256 of a range."""
    digest = hashlib.sha256()
    for block in read_range(fd, offset, size_bytes):
        digest.update(block)
    return digest.hexdigest()


def same_range(first_fd: int, second_fd: int, offset: int, size_bytes: int) -> bool:
    """True when two files hold the same bytes in one range."""
    pairs = zip(read_range(first_fd, offset, size_bytes), read_range(second_fd, offset, size_bytes), strict=True)
    return all(first == second for first, second in pairs)
