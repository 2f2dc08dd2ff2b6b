"""An OCI image layout in one deterministic, uncompressed tar: the writer and a strict reader.

Members, in this order: ``oci-layout``, ``index.json``, ``blobs/sha256/<hex>`` ascending. Headers are plain
POSIX ustar with fixed owner, mode and time; two zero blocks end the file. The reader recomputes
each header from the name and size it reads and compares all 512 bytes, so links, devices, sparse files, pax
extensions and every other tar feature are refused without a rule of their own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from patchctl.bundle.config import FILES_MAX
from patchctl.bundle.ranges import range_sha256, read_range
from patchctl.bundle.refusal import damaged
from patchctl.errors import ExitCode, PatchctlError

LAYOUT_NAME = "oci-layout"
LAYOUT_CONTENT = b'{"imageLayoutVersion":"1.0.0"}'
INDEX_NAME = "index.json"
BLOB_PREFIX = "blobs/sha256/"
# Our index is under 500 bytes.
INDEX_BYTES_MAX = 4096
# Manifest, config and tensor pack beside at most one layer per file.
BLOBS_MAX = FILES_MAX + 3

_BLOCK_BYTES = 512
_END = bytes(2 * _BLOCK_BYTES)
_OCTAL_LIMIT = 8**11
_OCTAL_SIZE = re.compile(rb"[0-7]{11}\0")
_BLOB_NAME = re.compile(re.escape(BLOB_PREFIX) + r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Span:
    """Where a blob's bytes are in the file."""

    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """A blob to write: its size and a function that yields its bytes."""

    size_bytes: int
    blocks: Callable[[], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class Contents:
    """A scanned file: ``index.json`` and the blobs by hex sha256, all hashed."""

    index: bytes
    blobs: Mapping[str, Span]


def member_header(name: str, size_bytes: int) -> bytes:
    """The only header a member may have. From 8 GiB on, the size is in GNU's base-256 form."""
    assert size_bytes >= 0  # noqa: S101 - the parser admits no sign
    octal = size_bytes < _OCTAL_LIMIT
    size = b"%011o\0" % size_bytes if octal else b"\x80" + size_bytes.to_bytes(11, "big")
    before = name.encode("ascii").ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size + b"00000000000\0"
    after = b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
    checksum = sum(before) + 8 * ord(" ") + sum(after)
    return before + b"%06o\0 " % checksum + after


def write_layout(out: BinaryIO, index: bytes, blobs: Mapping[str, Source]) -> None:
    """Write the whole file; every blob is hashed on the way and must be what its name says.

    Raises:
        PatchctlError: ``patch.source_changed``: a source does not yield the bytes it was planned with.
        OSError: from ``out``.
    """
    _write_member(out, LAYOUT_NAME, Source(len(LAYOUT_CONTENT), lambda: (LAYOUT_CONTENT,)))
    _write_member(out, INDEX_NAME, Source(len(index), lambda: (index,)))
    for sha256, source in sorted(blobs.items()):
        if _write_member(out, BLOB_PREFIX + sha256, source) != sha256:
            raise _source_changed(sha256)
    out.write(_END)


def scan(fd: int, size_bytes: int) -> Contents:
    """Read the whole file once, checking structure and hashing every blob, in bounded memory.

    Raises:
        PatchctlError: ``patch.damaged`` at the first byte that the writer would not have written.
    """
    end = size_bytes - len(_END)
    name, at, size = _member(fd, 0, end)
    if (name, size) != (LAYOUT_NAME, len(LAYOUT_CONTENT)) or _exactly(fd, at, size) != LAYOUT_CONTENT:
        raise damaged(f"the file does not begin with the expected {LAYOUT_NAME}")
    name, at, size = _member(fd, _after(fd, at, size), end)
    if name != INDEX_NAME or size > INDEX_BYTES_MAX:
        raise damaged(f"the second member is not {INDEX_NAME}, or it is too large")
    index = _exactly(fd, at, size)
    blobs: dict[str, Span] = {}
    previous = ""
    while (at := _after(fd, at, size)) < end:
        name, at, size = _member(fd, at, end)
        if not _BLOB_NAME.match(name) or name <= previous or len(blobs) >= BLOBS_MAX:
            raise damaged(f"unexpected, repeated, unsorted or surplus member {name!r}")
        sha256 = name.removeprefix(BLOB_PREFIX)
        if range_sha256(fd, at, size) != sha256:
            raise damaged(f"blob {sha256} does not match its digest")
        blobs[sha256] = Span(at, size)
        previous = name
    if _exactly(fd, at, len(_END)) != _END:
        raise damaged("the file is cut short, or something follows its end")
    return Contents(index=index, blobs=blobs)


def parse_header(block: bytes) -> tuple[str, int]:
    """Name and size of a header block that is exactly :func:`member_header` of the two.

    Raises:
        PatchctlError: ``patch.damaged``.
    """
    size_field = block[124:136]
    if _OCTAL_SIZE.fullmatch(size_field):
        size_bytes = int(size_field[:11], 8)
    elif size_field[0] == 0x80:  # noqa: PLR2004 - GNU base-256 marker
        size_bytes = int.from_bytes(size_field[1:], "big")
    else:
        raise damaged("a tar header has no valid size")
    raw_name = block[:100].rstrip(b"\0")
    if not raw_name.isascii() or member_header(raw_name.decode("ascii"), size_bytes) != block:
        raise damaged("a tar header is not in the canonical form")
    return raw_name.decode("ascii"), size_bytes


def _member(fd: int, at: int, end: int) -> tuple[str, int, int]:
    """Name, content offset and size of the member at ``at``, which must fit before ``end``."""
    name, size = parse_header(_exactly(fd, at, _BLOCK_BYTES))
    if size > end - at - _BLOCK_BYTES:
        raise damaged(f"{name} claims {size} bytes, more than the file has")
    return name, at + _BLOCK_BYTES, size


def _after(fd: int, start: int, size: int) -> int:
    """Where the next header is; the padding before it must be zero."""
    padding = -size % _BLOCK_BYTES
    if _exactly(fd, start + size, padding).count(0) != padding:
        raise damaged("padding is not zero")
    return start + size + padding


def _exactly(fd: int, at: int, size: int) -> bytes:
    data = b"".join(read_range(fd, at, size))
    if len(data) != size:
        raise damaged(f"the file ends at byte {at + len(data)}, inside a member")
    return data


def _write_member(out: BinaryIO, name: str, source: Source) -> str:
    digest = hashlib.sha256()
    written = 0
    out.write(member_header(name, source.size_bytes))
    for block in source.blocks():
        digest.update(block)
        written += out.write(block)
    out.write(bytes(-written % _BLOCK_BYTES))
    return digest.hexdigest()


def _source_changed(name: str) -> PatchctlError:
    return PatchctlError(
        code="patch.source_changed",
        what="The patch file was not written.",
        why=f"a build changed while it was read: {name} is not what was hashed before",
        exit_code=ExitCode.SIGNATURE,
    )
