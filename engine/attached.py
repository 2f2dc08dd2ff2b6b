"""The front that this engine is attached to: the newest data socket feeds the serve loop.

The agent hands over a data socket whenever a front is started. It replaces the one before: the old
front's requests are dropped, since nobody could receive their tokens.
"""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import CancelledError

import msgspec

from engine.attach import receive_data_socket
from engine.framing import Connection, FramingError
from engine.loop import ServeLoop
from engine.wire import ToEngine

_log = logging.getLogger(__name__)


class AttachedFront:
    """Takes data sockets from ``attach`` in :meth:`run`'s thread and reads the newest in another."""

    def __init__(self, attach: socket.socket, loop: ServeLoop) -> None:
        self._attach = attach
        self._loop = loop
        self._lock = threading.Lock()
        self._data: Connection | None = None
        self._reader: threading.Thread | None = None
        self._stopping = False

    def run(self) -> None:
        """Until the agent is gone or :meth:`stop`."""
        try:
            while (sock := receive_data_socket(self._attach)) is not None:
                self._replace(Connection(sock))
        except CancelledError:
            return  # the serve loop has ended
        except OSError:
            if not self._stopping:
                _log.exception("the attach socket failed; this engine keeps its present front")
        finally:
            if self._stopping and self._reader is not None:
                self._reader.join()

    def stop(self) -> None:
        """Wake :meth:`run` and the reader; nothing is taken any more."""
        with self._lock:
            self._stopping = True
            if self._data is not None:
                self._data.shutdown()
        try:
            self._attach.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _replace(self, data: Connection) -> None:
        """Let go of the present front, then serve the new one.

        The loop drops the old requests, sends to ``data`` and announces the active generation in one turn;
        only then are the new front's messages read, so that none of them is dropped with the old ones.
        """
        with self._lock:
            old, self._data = self._data, data
            if self._stopping:
                data.shutdown()
        if old is not None:
            old.shutdown()  # also wakes the serve loop, should it wait for this front to read
        if self._reader is not None:
            self._reader.join()
        self._loop.attach(data.send).result()
        if old is not None:
            old.close()
        self._reader = threading.Thread(target=self._read, args=(data,), name="front-reader", daemon=True)
        self._reader.start()

    def _read(self, data: Connection) -> None:
        """Post the front's messages until it goes; then nobody waits for its requests any more."""
        decoder = msgspec.msgpack.Decoder(ToEngine)
        try:
            while (frame := data.recv()) is not None:
                self._loop.post(decoder.decode(frame))
        except (OSError, FramingError, msgspec.MsgspecError):
            _log.exception("the front's connection failed")
            data.shutdown()
        self._loop.drop_requests()
