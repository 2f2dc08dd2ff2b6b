"""Clients that stream without a pause and stamp every token, in one background thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from tests.benchmarks.spans import Gap, Span, gaps_of

_TIMEOUT_S = 120.0
# A server that refuses everything must not be hammered.
_AFTER_FAILURE_S = 0.1
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request asks for; greedy."""

    prompt: str
    tokens_max: int


# Answers longer than ``tokens_max``, so that a stream is busy nearly all the time; unequal lengths, so that
# the streams never fall into step.
ASKS = (
    Ask("Write a long story about a lighthouse keeper and the sea.", 56),
    Ask("Explain in detail how copper is mined, refined and used.", 72),
    Ask("Describe a day in a busy harbour from dawn to midnight.", 64),
    Ask("Write a long essay on the history of bread.", 48),
    Ask("Explain to a child, step by step, why the sky is blue.", 80),
    Ask("Tell a long story about a clock that stopped and started again.", 60),
)


@dataclass(slots=True)
class Response:
    """What a client wrote down. ``finish`` is "" until the response ended as the API says it must."""

    ask: Ask
    started_ns: int
    arrivals_ns: list[int] = field(default_factory=list)
    text: str = ""
    generations: tuple[int, int] = (0, 0)
    finish: str = ""
    failure: str = ""

    @property
    def span(self) -> Span:
        """From the request to the last token so far."""
        return Span(self.started_ns, self.arrivals_ns[-1] if self.arrivals_ns else self.started_ns)

    @property
    def ended(self) -> bool:
        """True when nothing more comes."""
        return bool(self.finish or self.failure)


class Streams:
    """``count`` clients; each takes its next ask when the last one was answered."""

    def __init__(self, url: str, model: str, count: int, asks: Sequence[Ask] = ASKS, *, turns: int = 0) -> None:
        """``turns`` bounds the asks of one client; 0 goes on until :meth:`stop`."""
        self._url, self._model, self._count, self._asks, self._turns = url, model, count, asks, turns
        self._stopping = threading.Event()
        self.responses: list[Response] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="streams", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Let every open response end."""
        self._stopping.set()
        self._thread.join()

    def wait(self, holds: Callable[[Sequence[Response]], bool], timeout_s: float = 120.0) -> bool:
        """Wait until ``holds`` of the responses so far; False when it did not in time."""
        give_up = time.monotonic() + timeout_s
        while not holds(list(self.responses)):
            if time.monotonic() > give_up or not self._thread.is_alive():
                return False
            time.sleep(_POLL_S)
        return True

    def warm(self) -> None:
        """Wait until as many responses ended as there are clients: the first ones pay for cold caches.

        Raises:
            RuntimeError: they failed.
        """
        self.wait(lambda responses: sum(response.ended for response in responses) >= self._count)
        failures = [response.failure for response in self.responses if response.failure]
        if failures or not self.responses:
            raise RuntimeError(f"no answers to measure: {failures[:1]}")

    def window(self, seconds: float) -> Span:
        """Let them stream for a while."""
        began = time.monotonic_ns()
        time.sleep(seconds)
        return Span(began, time.monotonic_ns())

    @property
    def gaps(self) -> list[Gap]:
        """Every gap so far."""
        return gaps_of([list(response.arrivals_ns) for response in list(self.responses)])

    @property
    def failures(self) -> list[str]:
        """Responses that ended otherwise than the API promises."""
        return [response.failure for response in list(self.responses) if response.failure]

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self._count)
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(self._count)))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not self._stopping.is_set() and (not self._turns or turn < self._turns):
            response = Response(self._asks[(number + turn) % len(self._asks)], time.monotonic_ns())
            self.responses.append(response)
            turn += 1
            try:
                await _stream(http, self._model, response)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                response.failure = f"{type(error).__name__}: {error}"
            if response.finish not in ("stop", "length") and not response.failure:
                response.failure = f"ended with finish {response.finish!r}"
            if response.failure:
                await asyncio.sleep(_AFTER_FAILURE_S)


async def _stream(http: httpx.AsyncClient, model: str, response: Response) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": response.ask.prompt}],
        "max_tokens": response.ask.tokens_max,
        "temperature": 0,
        "stream": True,
    }
    finish = ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.is_error:
            response.failure = f"HTTP {reply.status_code}"
            return
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                response.finish = finish
                return
            finish = _take(json.loads(line.removeprefix("data: ")), response) or finish


def _take(event: dict[str, Any], response: Response) -> str:
    """Write down one event; returns the finish reason if it has one.

    Raises:
        ValueError: it is an error event.
    """
    if "error" in event:
        raise ValueError(str(event["error"]))
    choice = event["choices"][0] if event.get("choices") else {}
    if content := choice.get("delta", {}).get("content"):
        response.arrivals_ns.append(time.monotonic_ns())
        response.text += content
    if ours := event.get("patchctl"):
        response.generations = (ours["generation_begin"], ours["generation_end"])
    return choice.get("finish_reason") or ""
