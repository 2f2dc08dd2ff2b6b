"""The engine without processes and sockets: serve loop and controller as in production, tokens stamped as sent."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from engine.controller import Controller
from engine.loop import ServeLoop
from engine.wire import Control, Exchanged, Reply, Sampling, Stage, Submit, Swap, ToFront, Tokens
from tests.benchmarks.context import Build

_WAIT_S = 120.0


class InProcessEngine:
    """Serves ``build`` as generation 1 in this process until the block ends; one thread computes."""

    def __init__(self, build: Build) -> None:
        torch.set_num_threads(1)
        self._requests = itertools.count(1)
        self._news = threading.Condition()
        self._sent: list[tuple[int, ToFront]] = []
        self._ended: set[int] = set()
        self._steps = 0
        self._loop = ServeLoop()
        device = torch.device("cpu")
        self._controller = Controller(self._loop, device=device, arm=dict, digest_tensors=lambda _: {})
        self._thread = threading.Thread(target=self._loop.run, name="serve", daemon=True)
        self._build = build

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop.attach(self._receive).result(_WAIT_S)
        self.stage(1, self._build)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.stop()
        self._thread.join()
        self._controller.close()

    def stage(self, number: int, build: Build) -> dict[str, Any]:
        """Load a build; the first one serves at once."""
        return self._call(Stage(generation=number, folder=str(build.folder), digest=build.digest))

    def swap(self, number: int) -> dict[str, Any]:
        """Exchange to a resident generation."""
        return self._call(Swap(generation=number))

    def submit(self, prompt: Sequence[int], tokens_max: int) -> int:
        """Start a greedy request without stop tokens; returns its id."""
        request = next(self._requests)
        self._loop.post(Submit(request, tuple(prompt), tokens_max, Sampling()))
        return request

    def volley(self, prompts: Sequence[Sequence[int]], tokens_max: int) -> tuple[int, list[list[int]]]:
        """Run prompts side by side; returns when they were submitted and when every token was sent, in ns."""
        self.forget()
        began = time.monotonic_ns()
        requests = [self.submit(prompt, tokens_max) for prompt in prompts]
        self._wait(lambda: self._ended.issuperset(requests))
        arrivals: dict[int, list[int]] = {request: [] for request in requests}
        for at_ns, message in self._sent:
            for token in message.tokens if isinstance(message, Tokens) else ():
                if token.token >= 0:
                    arrivals[token.request].append(at_ns)
        return began, list(arrivals.values())

    def forget(self) -> None:
        """Forget what was sent so far."""
        with self._news:
            self._sent.clear()
            self._ended.clear()

    def steps(self) -> list[tuple[int, bool]]:
        """When each step's tokens were sent, in ns, and whether an exchange came between it and the step before."""
        steps, exchanged = [], False
        for at_ns, message in list(self._sent):
            if isinstance(message, Exchanged):
                exchanged = True
            elif isinstance(message, Tokens):
                steps.append((at_ns, exchanged))
                exchanged = False
        return steps

    def wait_for_step(self) -> None:
        """Wait until one more step sent tokens."""
        seen = self._steps
        self._wait(lambda: self._steps > seen)

    def ended(self, requests: Sequence[int]) -> bool:
        """True when all of them got their last token."""
        return self._ended.issuperset(requests)

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._news:
            if not self._news.wait_for(holds, _WAIT_S):
                raise TimeoutError("the engine makes no tokens")

    def _receive(self, message: ToFront) -> None:
        """Keep it short: this runs in the serve loop's thread."""
        at_ns = time.monotonic_ns()
        with self._news:
            self._sent.append((at_ns, message))
            if isinstance(message, Tokens):
                self._steps += 1
                self._ended.update(token.request for token in message.tokens if token.finish is not None)
                self._news.notify_all()

    def _call(self, message: Control) -> dict[str, Any]:
        reply: Reply = self._controller.handle(message).result(_WAIT_S)
        if not reply.ok:
            raise RuntimeError(f"{reply.code}: {reply.what}")
        return reply.data
