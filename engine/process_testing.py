"""For tests: an engine process with the agent's and the front's ends of its sockets."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from engine.attach import attach_pair, send_data_socket
from engine.build import BuildManifest
from engine.framing import Connection, FramingError
from engine.wire import (
    Control,
    Exchanged,
    Release,
    Reply,
    Sampling,
    Stage,
    Stats,
    Submit,
    Swap,
    ToFront,
    Tokens,
)

WAIT_S: Final = 60.0
# A prompt of more than one prefill chunk; an answer that is still running when a swap comes.
PROMPT_TOKENS: Final = 11
ANSWER_TOKENS: Final = 45
_CHILD: Final = """
import hashlib, sys
from engine.process import run
digest = lambda arrays: {name: hashlib.sha256(array).hexdigest() for name, array in arrays.items()}
sys.exit(run(int(sys.argv[1]), int(sys.argv[2]), arm=lambda: {"armed": True}, digest_tensors=digest))
"""


def prompt(i: int) -> list[int]:
    """One of many prompts, for a vocabulary of 256."""
    return [(i * 31 + j * 7) % 250 + 1 for j in range(PROMPT_TOKENS)]


class FrontPeer:
    """A front's end of a data socket: keeps every message the engine sends, and the tokens of each request."""

    def __init__(self, sock: socket.socket) -> None:
        self.connection = Connection(sock)
        self.messages: list[ToFront] = []
        self.events: defaultdict[int, list[tuple[int, int, str | None]]] = defaultdict(list)
        self.lost = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="front-peer", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
        with suppress(OSError, FramingError):
            while (frame := self.connection.recv()) is not None:
                message = decoder.decode(frame)
                with self._changed:
                    self.messages.append(message)
                    if isinstance(message, Tokens):
                        for token in message.tokens:
                            self.events[token.request].append((message.generation, token.token, token.finish))
                    self._changed.notify_all()
        with self._changed:
            self.lost = True
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until ``condition``, looked at after every message."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), self.messages[-3:]

    def close(self) -> None:
        """Go away, as a front that was killed does."""
        self.connection.shutdown()
        self._reader.join(WAIT_S)
        self.connection.close()


class EngineProcess:
    """An engine in a child process; one front is attached."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        control, control_there = socket.socketpair()
        self.attach_socket, attach_there = attach_pair()
        control.settimeout(WAIT_S)
        with control_there, attach_there:
            fds = [attach_there.fileno(), control_there.fileno()]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, *map(str, fds)],
                pass_fds=fds,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
        self.control = Connection(control)
        self.active = 0
        self._requests = itertools.count(1)
        self._numbers = itertools.count(1)
        self._fronts: list[FrontPeer] = []
        self.front = self.attach()

    def attach(self) -> FrontPeer:
        """A new front, in place of the one before, which stays open on its own side."""
        here, there = socket.socketpair()
        with there:
            send_data_socket(self.attach_socket, there)
        self.front = FrontPeer(here)
        self._fronts.append(self.front)
        return self.front

    # -- as the agent

    def send(self, message: Control) -> None:
        """Send a control message without waiting for its reply."""
        self.control.send(message)

    def reply(self) -> Reply:
        """The next reply."""
        frame = self.control.recv()
        assert frame is not None
        return msgspec.msgpack.decode(frame, type=Reply)

    def call(self, message: Control) -> Reply:
        """A control message and its reply."""
        self.send(message)
        return self.reply()

    def ok(self, message: Control) -> dict[str, Any]:
        """As :meth:`call`, and it must have been carried out."""
        reply = self.call(message)
        assert reply.ok, reply
        return reply.data

    def stats(self) -> dict[str, Any]:
        """The engine's counters."""
        return self.ok(Stats())

    def stage(self, folder: Path, digest: str = "", **options: Any) -> tuple[int, Reply]:
        """Stage a build under a new number."""
        number = next(self._numbers)
        manifest = msgspec.json.decode((folder / "build.json").read_bytes(), type=BuildManifest)
        return number, self.call(Stage(number, str(folder), digest or manifest.digest, **options))

    def serve(self, folder: Path) -> int:
        """Make ``folder`` the only generation; its number."""
        number, reply = self.stage(folder)
        assert reply.ok, reply
        if self.active:
            self.ok(Swap(number, "drain"))
            self.ok(Release(self.active))
        self.active = number
        return number

    # -- as the front

    def submit(
        self,
        tokens: Sequence[int],
        tokens_max: int = ANSWER_TOKENS,
        *,
        stop: tuple[int, ...] = (),
        **sampling: Any,
    ) -> int:
        """Send a request; its id."""
        request = next(self._requests)
        self.front.connection.send(Submit(request, tuple(tokens), tokens_max, Sampling(**sampling), stop))
        return request

    def start(self, count: int, tokens: int = 4, length: int = ANSWER_TOKENS) -> list[int]:
        """Begin ``count`` requests and wait until the first has some tokens."""
        requests = [self.submit(prompt(i), length) for i in range(count)]
        self.front.wait(lambda: len(self.answer(requests[0])) >= tokens)
        return requests

    def events(self, request: int) -> list[tuple[int, int, str | None]]:
        """Generation, token and finish of each token of a request."""
        return list(self.front.events[request])

    def answer(self, request: int) -> list[int]:
        """Its tokens so far."""
        return [token for _, token, _ in self.events(request) if token >= 0]

    def finish(self, request: int) -> str | None:
        """How a request ended; waits for it."""
        events = self.front.events[request]
        self.front.wait(lambda: bool(events and events[-1][2]))
        return events[-1][2]

    def run(self, tokens: Sequence[int], tokens_max: int = ANSWER_TOKENS, **sampling: Any) -> list[int]:
        """The answer to a request, which must use all of ``tokens_max``."""
        request = self.submit(tokens, tokens_max, **sampling)
        assert self.finish(request) == "length"
        return self.answer(request)

    @property
    def exchanges(self) -> list[int]:
        """Generations announced to the present front, in order."""
        return [message.generation for message in tuple(self.front.messages) if isinstance(message, Exchanged)]

    # -- its end

    def close(self) -> None:
        """End of file on both sockets; by force if that does not help."""
        self.control.shutdown()
        for front in self._fronts:
            front.close()
        self.attach_socket.close()
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
