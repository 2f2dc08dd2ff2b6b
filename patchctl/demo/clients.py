"""Clients that stream completions all the time and write down when every token arrived."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx

from patchctl.demo.response import Response

# Different lengths and subjects, so that the four streams never fall into step.
_PROMPTS = (
    "Write two sentences about the sea.",
    "Name three uses of copper and say why each works.",
    "Explain to a child why the sky is blue.",
    "Give a short recipe for pancakes.",
    "What does a lighthouse keeper do all day?",
    "List four rivers and one fact about each.",
    "Tell a very short story about a clock that stopped.",
)
_TOKENS_MAX = (24, 40, 32, 48, 28)
_TIMEOUT_S = 120.0
# A host that refuses everything must not be hammered.
_AFTER_FAILURE_S = 0.1


class StreamingClients:
    """``count`` clients in one background thread; each starts a new request ``pause_s`` after the last one ended."""

    def __init__(self, url: str, model: str, count: int, *, pause_s: float = 0.0) -> None:
        self._url = url
        self._model = model
        self._count = count
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self.responses: list[Response] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="demo-clients", daemon=True)

    def start(self) -> None:
        """Begin to stream."""
        self._thread.start()

    def stop(self) -> None:
        """Let every open response finish, then end."""
        self._stopping.set()
        self._thread.join()

    @property
    def finished(self) -> list[Response]:
        """Responses that ended, well or not."""
        return [response for response in self.responses if response.generations is not None or response.failure]

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=self._count)
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._stream(http, number) for number in range(self._count)))

    async def _stream(self, http: httpx.AsyncClient, number: int) -> None:
        turn = number
        while not self._stopping.is_set():
            response = Response(number)
            self.responses.append(response)
            body = {
                "model": self._model,
                "messages": [{"role": "user", "content": _PROMPTS[turn % len(_PROMPTS)]}],
                "max_tokens": _TOKENS_MAX[turn % len(_TOKENS_MAX)],
                "temperature": 0,
                "stream": True,
            }
            turn += 1
            try:
                await _read(http, body, response)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                response.failure = f"{type(error).__name__}: {error}"
            if response.generations is None and not response.failure:
                response.failure = "the stream ended without its last event"
            await asyncio.sleep(max(self._pause_s, _AFTER_FAILURE_S if response.failure else 0.0))


async def _read(http: httpx.AsyncClient, body: dict[str, object], response: Response) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.is_error:
            response.failure = f"HTTP {reply.status_code}"
            return
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                response.failure = str(event["error"])
                return
            choice = event["choices"][0] if event.get("choices") else {}
            if choice.get("delta", {}).get("content"):
                response.arrivals_ns.append(time.time_ns())
            if ours := event.get("patchctl"):
                response.generations = (ours["generation_begin"], ours["generation_end"])
