"""A front and an engine in processes of their own, driven as the agent drives them, and when each thing was done."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from patchctl.agent.host import EngineHost
from tests.benchmarks.context import Build
from tests.benchmarks.spans import Span

_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Done:
    """A verb: when it ran and what the engine answered."""

    span: Span
    data: dict[str, Any]


class Pair:
    """Serves ``build`` on loopback until the block ends; numbers generations by itself."""

    def __init__(self, build: Build) -> None:
        self._listen = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.url = f"http://127.0.0.1:{self._listen.getsockname()[1]}"
        self.model = build.manifest.name
        self.host = EngineHost(self._listen)
        self.builds: dict[int, Build] = {}
        self._first = build

    def __enter__(self) -> Self:
        try:
            self.builds[1] = self._first
            self.host.start(1, self._first.folder, self._first.digest)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def active(self) -> int:
        """The serving generation."""
        return self.host.active_generation

    def stage(self, build: Build) -> tuple[int, Done]:
        """Load ``build`` beside the active generation; returns its number."""
        number = len(self.builds) + 1
        self.builds[number] = build
        return number, _timed(lambda: self.host.stage(number, build.folder, build.digest))

    def swap(self, number: int) -> Done:
        """Exchange to a resident generation."""
        return _timed(lambda: self.host.swap(number))

    def release(self, number: int) -> Done:
        """Free a generation that does not serve."""

        def release() -> dict[str, Any]:
            self.host.release(number)
            return {}

        return _timed(release)

    def pid(self, role: str) -> int:
        """Process id of ``engine`` or ``front``."""
        return self.host.processes.pids[role]

    def _close(self) -> None:
        self.host.close()
        self._listen.close()


def _timed(verb: Callable[[], dict[str, Any]]) -> Done:
    began = time.monotonic_ns()
    data = verb()
    return Done(Span(began, time.monotonic_ns()), data)
