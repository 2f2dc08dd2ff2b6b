"""Data sockets: how the agent hands them over, and the frames on one of them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final, Protocol, cast

import msgspec

from engine.attach import receive_data_socket
from engine.framing import Decoder, FramingError, encode_frame
from engine.wire import ToEngine, ToFront

_MESSAGES: Final = msgspec.msgpack.Decoder(ToFront)
_log = logging.getLogger(__name__)


class EngineOwner(Protocol):
    """Whom connections report to."""

    def attached(self, connection: EngineConnection) -> None:
        """A new engine; whatever was attached before is gone."""

    def received(self, message: ToFront) -> None:
        """The attached engine's next message."""

    def lost(self, connection: EngineConnection) -> None:
        """This engine is gone; called once, maybe after the next one was attached."""


class EngineConnection(asyncio.Protocol):
    """One data socket, from one engine process."""

    def __init__(self, owner: EngineOwner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._frames = Decoder()

    def send(self, message: ToEngine) -> None:
        """Send a message; to an engine that is gone it goes nowhere."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def abort(self) -> None:
        """Let go of the socket now."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is adopted."""
        self._transport = cast("asyncio.Transport", transport)
        self._owner.attached(self)

    def data_received(self, data: bytes) -> None:
        """Frames from the engine; one that does not parse ends the connection."""
        try:
            for frame in self._frames.feed(data):
                self._owner.received(_MESSAGES.decode(frame))
        except (FramingError, msgspec.MsgspecError):
            _log.exception("the engine sent something that is not a message; connection closed")
            self.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        """The engine is gone."""
        self._owner.lost(self)


async def adopt_connections(attach: socket.socket, connect: Callable[[], EngineConnection]) -> None:
    """Connect every data socket that arrives on ``attach``, until the agent is gone."""
    loop = asyncio.get_running_loop()
    attach.setblocking(False)
    while True:
        await _readable(attach)
        try:
            data = receive_data_socket(attach)
            if data is None:
                return
            await loop.create_connection(connect, sock=data)
        except BlockingIOError:
            continue
        except (OSError, ValueError):  # no socket, or not a connected stream socket: the next one may be
            _log.exception("the agent handed over something that is not a data socket")


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
