"""One request at the engine: its tokens as they arrive, turned into text.

Token events come in from the link without waiting; the response takes text pieces out at the pace of its
client. The queue between them is bounded by ``tokens_max``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from engine.front.detokenize import Detokenizer
from engine.front.stops import StopMatcher
from engine.wire import FinishReason

Finish = Literal["stop", "length"]


class ResponseFailedError(Exception):
    """The response cannot be completed. ``code`` is a stable identifier."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


class ClientGoneError(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text for the client; ``finish`` is set on the last piece."""

    text: str
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token, or only its finish (token -1), and the generation that made it."""

    generation: int
    token: int
    finish: FinishReason | None


class Inflight:
    """A submitted request.

    Attributes:
        number: the request id on the wire.
        generation_end: the generation that made the latest token.
        tokens_out: tokens consumed so far.
        last_token_s: when the latest token arrived (event-loop clock), None before the first.
    """

    __slots__ = ("_cancel", "_events", "generation_end", "last_token_s", "number", "submitted_s", "tokens_out")

    def __init__(self, number: int, generation: int, submitted_s: float, cancel: Callable[[int], None]) -> None:
        self.number = number
        self.generation_end = generation
        self.tokens_out = 0
        self.submitted_s = submitted_s
        self.last_token_s: float | None = None
        self._events: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        self._cancel = cancel

    def push(self, event: TokenEvent | Exception) -> None:
        """Hand over a token, or the reason why there will be no more."""
        self._events.put_nowait(event)

    def cancel(self) -> None:
        """Stop the engine's work on it; harmless when it already ended."""
        self._cancel(self.number)

    async def pieces(self, detokenizer: Detokenizer, matcher: StopMatcher) -> AsyncIterator[Piece]:
        """Text until the finish. A token without certain text yields nothing.

        Raises:
            ResponseFailedError: the engine failed, ended it on its own, or is gone.
            ClientGoneError: see there.
        """
        while True:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            self.generation_end = event.generation
            text = ""
            if event.token >= 0:
                self.tokens_out += 1
                text = detokenizer.add(event.token)
            if event.finish in ("error", "cancelled"):
                raise ResponseFailedError(
                    f"engine_{event.finish}", "the engine ended the request before it was complete"
                )
            text, stopped = matcher.add(text + (detokenizer.finish() if event.finish else ""))
            if stopped:
                self.cancel()
                yield Piece(text, "stop")
                return
            if event.finish == "stop" or event.finish == "length":  # noqa: PLR1714 - narrows the type
                yield Piece(text + matcher.finish(), event.finish)
                return
            if text:
                yield Piece(text)
