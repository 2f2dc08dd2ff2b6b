"""The agent's end of a control socket: one message, one reply, bounded in time."""

from __future__ import annotations

import socket
import threading

import msgspec

from engine.framing import Connection, FramingError
from engine.wire import Control, Reply
from patchctl.errors import PatchctlError

# An Inspect of a large model is the slowest plain question; Stage and Swap name their own limit.
REPLY_S_MAX = 60.0


class ControlLink:
    """Control channel to the front or the engine process.

    A reply that comes too late would answer the wrong question, so a timeout breaks the link: the
    supervisor then replaces the process.
    """

    def __init__(self, role: str, sock: socket.socket) -> None:
        self.role = role
        self._sock = sock
        self._connection = Connection(sock)
        self._lock = threading.Lock()
        self._broken = ""

    @property
    def broken(self) -> str:
        """Why nothing can be asked here any more, or ""."""
        return self._broken

    def request(self, message: Control, timeout_s: float = REPLY_S_MAX) -> Reply:
        """Send ``message`` and wait for its reply.

        Raises:
            PatchctlError: ``host.process_gone`` when the process died or did not answer in time.
        """
        with self._lock:
            if self._broken:
                raise self.gone(self._broken)
            self._sock.settimeout(timeout_s)
            try:
                self._connection.send(message)
                body = self._connection.recv()
                if body is None:
                    raise ConnectionResetError("it closed its control socket")
                return msgspec.msgpack.decode(body, type=Reply)
            except TimeoutError as error:
                self._broken = f"no answer to {type(message).__name__} within {timeout_s:.0f} s"
                raise self.gone(self._broken) from error
            except (OSError, FramingError, msgspec.MsgspecError) as error:
                self._broken = str(error)
                raise self.gone(self._broken) from error

    def call(self, message: Control, timeout_s: float = REPLY_S_MAX) -> Reply:
        """As :meth:`request`, but a refusal is raised too.

        Raises:
            PatchctlError: ``host.process_gone``, or ``engine.<code>`` with the process's own words.
        """
        reply = self.request(message, timeout_s)
        if not reply.ok:
            raise PatchctlError(
                code=f"{self.role}.{reply.code}",
                what=f"the {self.role} process refused {type(message).__name__}",
                why=reply.what,
                serving="the active generation, untouched",
                next_command="patchctl status",
            )
        return reply

    def close(self) -> None:
        """Close the socket; the process sees end of file and exits."""
        self._broken = self._broken or "its control socket is closed"
        self._connection.shutdown()
        # Whoever waits for a reply was woken just now, and lets go of the descriptor before it is closed.
        with self._lock:
            self._connection.close()

    def gone(self, why: str) -> PatchctlError:
        """The error of a process that does not answer any more."""
        return PatchctlError(
            code="host.process_gone",
            what=f"the {self.role} process did not answer",
            why=why,
            serving="the last committed build, as soon as the agent has replaced the process",
            next_command="patchctl status",
        )
