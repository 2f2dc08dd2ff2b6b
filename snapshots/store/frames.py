"""How a chunk lies on disk: one byte that names the encoding, then the content, compressed when that pays.

zstd at level 1 needs the ``zstandard`` package; without it chunks are stored raw, and compressed ones written by
another installation are refused with that reason.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from blake3 import blake3

from snapshots.tensor_chunks import CHUNK_BYTES

_RAW: Final = b"\x00"
_ZSTD: Final = b"\x01"
_ZSTD_LEVEL = 1
# Compressed content that saves less than this share is stored raw: reading it back is then one copy.
_SAVED_SHARE_MIN = 1 / 16
FRAME_BYTES_MAX: Final = CHUNK_BYTES + len(_RAW)


class FrameInvalidError(ValueError):
    """The bytes are not a frame, or need a package that is not installed."""


def _load_zstd() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


_zstd: Any = _load_zstd()


def chunk_name(data: bytes | memoryview) -> str:
    """The name of a chunk: the blake3 of its content, 64 hex digits."""
    return blake3(data).hexdigest()


def encode(data: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """Tag and body of a chunk of at most :data:`CHUNK_BYTES`."""
    assert len(data) <= CHUNK_BYTES
    if _zstd is not None:
        packed: bytes = _zstd.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)
        if len(packed) <= len(data) * (1 - _SAVED_SHARE_MIN):
            return _ZSTD, packed
    return _RAW, data


def decode(frame: bytes) -> bytes:
    """The content of a frame.

    Raises:
        FrameInvalidError: malformed, larger than a chunk, or compressed and ``zstandard`` is not installed.
    """
    tag, body = frame[:1], frame[1:]
    if tag == _RAW and len(frame) <= FRAME_BYTES_MAX:
        return body
    if tag != _ZSTD:
        raise FrameInvalidError("not a chunk file of this version")
    if _zstd is None:
        raise FrameInvalidError("it is compressed; install the package zstandard to read it")
    try:
        # The declared size decides what is allocated: check it before anything is unpacked.
        if _zstd.get_frame_parameters(body).content_size > CHUNK_BYTES:
            raise FrameInvalidError(f"it unpacks to more than {CHUNK_BYTES} bytes")
        data: bytes = _zstd.ZstdDecompressor().decompress(body, max_output_size=CHUNK_BYTES)
    except _zstd.ZstdError as error:
        raise FrameInvalidError(f"it does not unpack: {error}") from error
    return data
