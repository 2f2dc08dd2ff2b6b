"""Open safetensors files: read their header, compare two of them tensor by tensor."""

from __future__ import annotations

import os

from patchctl.bundle.ranges import read_range, same_range
from patchctl.bundle.safetensors import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    Header,
    SafetensorsInvalidError,
    TensorEntry,
    parse_header,
)


def read_header(fd: int) -> Header:
    """Read and parse the header of an open file.

    Raises:
        SafetensorsInvalidError: as :func:`parse_header`, or the header is cut short or too large.
    """
    size_bytes = os.fstat(fd).st_size
    prefix = os.pread(fd, LENGTH_BYTES, 0)
    end = LENGTH_BYTES + int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES or end > min(size_bytes, HEADER_BYTES_MAX):
        raise SafetensorsInvalidError(f"the header would end at byte {end}")
    return parse_header(b"".join(read_range(fd, 0, end)), size_bytes)


def changed_tensors(old_fd: int, new_fd: int, header: Header) -> tuple[TensorEntry, ...]:
    """The tensors whose bytes differ between two files that both have ``header``, in data order."""
    return tuple(entry for entry in header.tensors if not same_range(old_fd, new_fd, entry.offset, entry.size_bytes))
