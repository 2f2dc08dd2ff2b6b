"""The engine without processes and sockets: serve loop, controller and a client that keeps it busy."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self

import torch

from engine.controller import Controller
from engine.loop import ServeLoop
from engine.wire import Control, Exchanged, Release, Reply, Sampling, Stage, Stats, Submit, Swap, ToFront, Tokens
from tests.gpu.plan import Build

_WAIT_S = 120.0
_MS = 1e6  # nanoseconds
_PROMPT_TOKENS = 24
_ANSWER_TOKENS = 96
_PROMPT_STRIDE = 7919


class Engine:
    """Serves ``build`` as generation 1 until the block ends."""

    def __init__(self, device: torch.device, build: Build, *, vocab: int, context: int) -> None:
        self._vocab = vocab
        self._answer_tokens = min(_ANSWER_TOKENS, context - _PROMPT_TOKENS)
        self._ids = itertools.count(1)
        self._news = threading.Condition()
        self._steps: list[tuple[int, bool]] = []
        self._exchanged = False
        self._streams = 0
        self.answers: dict[int, list[int]] = {}
        self.ended: Counter[str] = Counter()
        self._loop = ServeLoop()
        self._controller = Controller(self._loop, device=device, arm=dict, digest_tensors=lambda _: {})
        self._thread = threading.Thread(target=self._loop.run, name="serve")
        self._build = build

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._loop.attach(self._receive).result(_WAIT_S)
            self.stage(1, self._build)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.stop()
        self._thread.join()
        self._controller.close()

    def stage(self, number: int, build: Build, commit_mode: Literal["exchange", "copy"] = "exchange") -> dict[str, Any]:
        """Load a build; the first one serves at once."""
        return self._call(Stage(number, str(build.folder), build.digest, commit_mode))

    def swap(self, number: int, policy: Literal["auto", "carry", "recompute", "drain"] = "auto") -> dict[str, Any]:
        """Exchange to a resident generation; returns the reply once a step followed the exchange."""
        data = self._call(Swap(number, policy))
        self.wait_for_steps(2)
        return data

    def release(self, number: int) -> None:
        """Free a generation."""
        self._call(Release(number))

    def stats(self) -> dict[str, Any]:
        """The engine's own figures."""
        return self._call(Stats())

    def keep_busy(self, streams: int) -> None:
        """Have ``streams`` requests under way at any time, until told otherwise."""
        with self._news:
            missing, self._streams = streams - self._streams, streams
        for _ in range(missing):
            self._submit()

    def settle(self) -> None:
        """No new requests; wait until those under way have ended."""
        with self._news:
            self._streams = 0
        self._wait(lambda: len(self.answers) == self.ended.total())

    def answer(self, count: int, meanwhile: Callable[[], object] = lambda: None) -> list[list[int]]:
        """Tokens of ``count`` fixed prompts run side by side; ``meanwhile`` is called once they are under way."""
        self.settle()
        requests = [self._submit(prompt) for prompt in range(count)]
        self.wait_for_steps(4)
        meanwhile()
        self._wait(lambda: len(self.answers) == self.ended.total())
        return [self.answers[request] for request in requests]

    def forget(self) -> None:
        """Forget the steps so far."""
        with self._news:
            self._steps.clear()

    def wait_for_steps(self, count: int) -> None:
        """Wait until that many more steps sent tokens, or nothing is under way."""
        seen = len(self._steps)
        self._wait(lambda: len(self._steps) >= seen + count or len(self.answers) == self.ended.total())

    def gaps_ms(self) -> tuple[list[float], list[float]]:
        """Times between tokens of one step and the next: without and with an exchange between them."""
        steps = list(self._steps)
        gaps = [((at - before) / _MS, swapped) for (before, _), (at, swapped) in itertools.pairwise(steps)]
        return [gap for gap, swapped in gaps if not swapped], [gap for gap, swapped in gaps if swapped]

    def _submit(self, prompt: int | None = None) -> int:
        request = next(self._ids)
        first = request if prompt is None else prompt
        tokens = tuple((first * 31 + i + 1) * _PROMPT_STRIDE % self._vocab for i in range(_PROMPT_TOKENS))
        with self._news:
            self.answers[request] = []
        self._loop.post(Submit(request, tokens, self._answer_tokens, Sampling()))
        return request

    def _receive(self, message: ToFront) -> None:
        """Keep it short: this runs in the serve loop's thread."""
        now_ns, again = time.monotonic_ns(), 0
        with self._news:
            if isinstance(message, Exchanged):
                self._exchanged = True
            elif isinstance(message, Tokens):
                self._steps.append((now_ns, self._exchanged))
                self._exchanged = False
                for token in message.tokens:
                    if token.token >= 0:
                        self.answers[token.request].append(token.token)
                    if token.finish is not None:
                        self.ended[token.finish] += 1
                again = max(0, self._streams - (len(self.answers) - self.ended.total()))
                self._news.notify_all()
        for _ in range(again):
            self._submit()

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._news:
            if not self._news.wait_for(holds, _WAIT_S):
                raise TimeoutError("the engine makes no tokens")

    def _call(self, message: Control) -> dict[str, Any]:
        reply: Reply = self._controller.handle(message).result(_WAIT_S)
        if not reply.ok:
            raise RuntimeError(f"{reply.code}: {reply.what}")
        return reply.data
