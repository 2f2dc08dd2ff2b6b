"""A few clients that send short requests as fast as they are answered, one in four as a stream."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

_CLIENTS = 8
# Few enough that every one of them is asked often, so that a text has others to be compared with.
_ASKS = 16
_TOKENS = (1, 4, 8, 12)
_STREAM_EVERY = 4
_TIMEOUT_S = 60.0
_AFTER_FAILURE_S = 0.05


@dataclass(slots=True)
class Answer:
    """One request. ``ask`` numbers its prompt; ``failure`` is "" when it ended as the API promises."""

    ask: int
    began_ns: int
    ended_ns: int = 0
    text: str = ""
    generations: tuple[int, int] = (0, 0)
    failure: str = ""


def plain_rate(url: str, seconds: float) -> float:
    """``GET /health`` per second by as many clients: what client and HTTP server reach without an engine."""

    async def client(http: httpx.AsyncClient, until_s: float) -> int:
        count = 0
        while time.monotonic() < until_s:
            (await http.get("/health")).raise_for_status()
            count += 1
        return count

    async def run() -> int:
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http:
            until_s = time.monotonic() + seconds
            return sum(await asyncio.gather(*(client(http, until_s) for _ in range(_CLIENTS))))

    return asyncio.run(run()) / seconds


class ShortRequests:
    """Sends ``count`` requests in a background thread."""

    def __init__(self, url: str, model: str, count: int) -> None:
        self._url, self._model, self._count = url, model, count
        self._turns = iter(range(count))
        self._stopping = threading.Event()
        self.answers: list[Answer] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="requests", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; True when everything was answered."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Send nothing more and let every open request end."""
        self._stopping.set()
        self._thread.join()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=_CLIENTS)
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._client(http) for _ in range(_CLIENTS)))

    async def _client(self, http: httpx.AsyncClient) -> None:
        for turn in self._turns:
            if self._stopping.is_set():
                return
            answer = Answer(turn % _ASKS, time.monotonic_ns())
            try:
                await self._ask(http, answer, stream=turn // _ASKS % _STREAM_EVERY == 0)
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                answer.failure = f"{type(error).__name__}: {error}"
            answer.ended_ns = time.monotonic_ns()
            self.answers.append(answer)
            if answer.failure:
                await asyncio.sleep(_AFTER_FAILURE_S)

    async def _ask(self, http: httpx.AsyncClient, answer: Answer, *, stream: bool) -> None:
        body = {
            "model": self._model,
            "prompt": f"request number {answer.ask}",
            "max_tokens": _TOKENS[answer.ask % len(_TOKENS)],
            "temperature": 0,
            "stream": stream,
        }
        finish = ""
        if not stream:
            reply = await http.post("/v1/completions", json=body)
            reply.raise_for_status()
            finish = _take(reply.json(), answer)
        else:
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                reply.raise_for_status()
                ended = False
                async for line in reply.aiter_lines():
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: "):
                        finish = _take(json.loads(line.removeprefix("data: ")), answer) or finish
                finish = finish if ended else ""
        if finish not in ("stop", "length"):
            answer.failure = f"ended with finish {finish!r}"


def _take(event: dict[str, Any], answer: Answer) -> str:
    """Add a body or one event of a stream; returns its finish reason.

    Raises:
        ValueError: it is an error event.
    """
    if "error" in event:
        raise ValueError(str(event["error"]))
    choice = event["choices"][0]
    answer.text += choice["text"]
    if ours := event.get("patchctl"):
        answer.generations = (ours["generation_begin"], ours["generation_end"])
    return choice.get("finish_reason") or ""
