"""Frames on a stream socket: a 4-byte little-endian length, then a msgpack body.

:class:`Decoder` is pure, so an asyncio reader can use it as well; :class:`Connection` is the blocking
shell that engine threads use. A frame above the size cap is refused before any of it is buffered:
the peer is a sibling process, and a length of 4 GiB can only be a defect.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from typing import Any

import msgspec

# A prompt of 100,000 tokens is about 0.5 MB of msgpack; an Inspect reply of a large model about 1 MB.
FRAME_BYTES_MAX = 16 << 20
_LENGTH = struct.Struct("<I")
_RECV_BYTES = 1 << 16
_encoder = msgspec.msgpack.Encoder()


class FramingError(ValueError):
    """The stream is not a sequence of frames: oversized length, or it ended inside a frame."""


def encode_frame(message: Any) -> bytes:
    """One frame: length and msgpack body of a :mod:`engine.wire` message.

    Raises:
        FramingError: the body has more than :data:`FRAME_BYTES_MAX` bytes.
    """
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise FramingError(f"message has {len(body)} bytes, more than {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a byte stream into frame bodies, whatever the chunking."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an unfinished frame; not 0 at end of stream means the peer died mid-frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; returns the bodies of the frames now complete, in order.

        Raises:
            FramingError: a length above :data:`FRAME_BYTES_MAX`. The decoder must not be used again.
        """
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > FRAME_BYTES_MAX:
                raise FramingError(f"frame of {length} bytes announced, more than {FRAME_BYTES_MAX}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


class Connection:
    """A connected stream socket carrying frames: one reading thread, any number of writing threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._decoder = Decoder()
        self._ready: deque[bytes] = deque()

    @classmethod
    def from_fd(cls, fd: int) -> Connection:
        """Adopt an inherited socket descriptor."""
        return cls(socket.socket(fileno=fd))

    def send(self, message: Any) -> None:
        """Send one message whole; blocks while the peer's buffer is full.

        Raises:
            OSError: the peer is gone.
            FramingError: the message is too large; nothing was sent.
        """
        frame = encode_frame(message)
        with self._send_lock:
            self._sock.sendall(frame)

    def recv(self) -> bytes | None:
        """The next frame body, or None at end of stream.

        Raises:
            FramingError: oversized frame, or the stream ended inside one.
            OSError: the connection broke.
        """
        while not self._ready:
            data = self._sock.recv(_RECV_BYTES)
            if not data:
                if self._decoder.buffered_bytes:
                    raise FramingError("stream ended inside a frame")
                return None
            self._ready.extend(self._decoder.feed(data))
        return self._ready.popleft()

    def shutdown(self) -> None:
        """Wake every thread blocked on this connection; safe to call twice or on a dead peer."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Release the descriptor; no thread may use the connection any more."""
        self._sock.close()
