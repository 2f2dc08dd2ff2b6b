"""The data socket: requests to the engine, tokens and exchanges from it.

The socket is ordered and read on the event loop, so an exchange takes effect between the last token of
the old generation and the first of the new one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, cast

import msgspec

from engine.framing import Decoder, FramingError, encode_frame
from engine.front.generations import Generation, Generations
from engine.front.inflight import Inflight, ResponseFailedError, TokenEvent
from engine.front.metrics import Metrics
from engine.wire import Cancel, Exchanged, Sampling, Submit, ToFront, Tokens

# Requests the engine has not begun. More only wait longer than a client's patience; they are told to retry.
WAITING_MAX: Final = 64
_log = logging.getLogger(__name__)


class EngineLink(asyncio.Protocol):
    """The front's end of the data socket."""

    def __init__(self, generations: Generations, metrics: Metrics) -> None:
        self._generations = generations
        self._metrics = metrics
        self._transport: asyncio.Transport | None = None
        self._frames = Decoder()
        self._messages = msgspec.msgpack.Decoder(ToFront)
        self._inflight: dict[int, Inflight] = {}
        self._last_number = 0
        self._waiting = 0

    @property
    def up(self) -> bool:
        """Whether the engine can be reached."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def waiting(self) -> int:
        """Requests without a token yet."""
        return self._waiting

    @property
    def running(self) -> int:
        """Requests with at least one token."""
        return len(self._inflight) - self._waiting

    def submit(self, generation: Generation, prompt: tuple[int, ...], tokens_max: int, sampling: Sampling) -> Inflight:
        """Send a request. The link must be up."""
        assert self._transport is not None
        self._last_number += 1
        number = self._last_number
        inflight = Inflight(number, generation.number, asyncio.get_running_loop().time(), self.cancel)
        self._inflight[number] = inflight
        self._waiting += 1
        self._metrics.prompt_tokens += len(prompt)
        self._send(Submit(number, prompt, tokens_max, sampling, generation.assets.stop_tokens))
        return inflight

    def cancel(self, number: int) -> None:
        """Withdraw a request that has not ended: its later tokens are ignored."""
        if self._forget(number) is not None and self.up:
            self._send(Cancel(number))

    def fail_all(self, code: str, what: str) -> None:
        """End every request with an error that its client sees."""
        for number, inflight in tuple(self._inflight.items()):
            inflight.push(ResponseFailedError(code, what))
            self.cancel(number)

    def close(self) -> None:
        """Let go of the socket."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is adopted."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Frames from the engine; one that does not parse ends the link."""
        try:
            for frame in self._frames.feed(data):
                self._receive(self._messages.decode(frame))
        except (FramingError, msgspec.MsgspecError):
            _log.exception("the engine sent something that is not a message; link closed")
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        """The engine is gone: nothing in flight can be completed."""
        self._transport = None
        self.fail_all("engine_link_lost", "the connection to the engine was lost")

    # internal

    def _send(self, message: Submit | Cancel) -> None:
        assert self._transport is not None
        self._transport.write(encode_frame(message))

    def _receive(self, message: ToFront) -> None:
        if isinstance(message, Exchanged):
            if not self._generations.exchange(message.generation):
                _log.error("the engine exchanged to generation %d, not staged here", message.generation)
            return
        self._take(message)

    def _take(self, message: Tokens) -> None:
        now_s = asyncio.get_running_loop().time()
        for token in message.tokens:
            inflight = self._inflight.get(token.request)
            if inflight is None:
                continue
            if token.token >= 0:
                self._time(inflight, now_s)
            inflight.push(TokenEvent(message.generation, token.token, token.finish))
            if token.finish is not None:
                self._forget(token.request)

    def _time(self, inflight: Inflight, now_s: float) -> None:
        self._metrics.tokens_out += 1
        if inflight.last_token_s is None:
            self._waiting -= 1
            self._metrics.ttft.observe(now_s - inflight.submitted_s)
        else:
            self._metrics.inter_token.observe(now_s - inflight.last_token_s)
        inflight.last_token_s = now_s

    def _forget(self, number: int) -> Inflight | None:
        inflight = self._inflight.pop(number, None)
        if inflight is not None and inflight.last_token_s is None:
            self._waiting -= 1
        return inflight
