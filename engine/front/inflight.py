"""One response's sequences at the engine: their tokens as they arrive, turned into text.

Token events come in from the link without waiting; the response takes pieces out at the pace of its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from engine.front.choice import Choice, Piece, TokenEvent

# Tokens, or alternatives of a token, that may wait for a client: about 100 bytes each, so 1.6 MB a client. Beyond,
# it reads so slowly that its text would only pile up here.
BACKLOG_MAX: Final = 1 << 14


class ClientGoneError(Exception):
    """The client closed the connection."""


class ClientTooSlowError(Exception):
    """The client did not take its text in time."""


class Inflight:
    """The sequences of one response, one per choice.

    Attributes:
        numbers: their request ids on the wire, by choice.
        generation_end: the generation that made the latest token.
        tokens_out: tokens consumed so far, of all choices.
        cached_tokens: of the prompt, found in the prefix cache.
        arrived_s: when the client's request came (event-loop clock).
    """

    __slots__ = (
        "_backlog",
        "_cancel",
        "_events",
        "arrived_s",
        "cached_tokens",
        "generation_end",
        "numbers",
        "tokens_out",
    )

    def __init__(
        self, numbers: tuple[int, ...], generation: int, arrived_s: float, cancel: Callable[[int], None]
    ) -> None:
        self.numbers = numbers
        self.generation_end = generation
        self.arrived_s = arrived_s
        self.tokens_out = 0
        self.cached_tokens = 0
        self._events: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        self._backlog = 0
        self._cancel = cancel

    def push(self, event: TokenEvent | Exception) -> None:
        """Hand over a token, or the reason why there will be no more."""
        self._backlog += _weight(event)
        if self._backlog > BACKLOG_MAX:
            self._events = asyncio.Queue()
            self._backlog = 0
            self.cancel()
            event = ClientTooSlowError()
        self._events.put_nowait(event)

    def cancel(self) -> None:
        """Stop the engine's work on all of it; harmless when it already ended."""
        for number in self.numbers:
            self._cancel(number)

    async def pieces(self, choices: Sequence[Choice]) -> AsyncIterator[Piece]:
        """Text of all choices, interleaved as the engine makes it, until the last one finishes.

        Raises:
            ResponseFailedError: the engine failed, ended a choice on its own, or is gone.
            ClientGoneError: see there.
            ClientTooSlowError: see there.
        """
        ahead = len(choices)
        while ahead:
            event = await self._events.get()
            self._backlog -= _weight(event)
            if isinstance(event, Exception):
                raise event
            choice = choices[event.index]
            if choice.finish is not None:
                continue
            self.generation_end = event.generation
            self.tokens_out += event.token >= 0
            piece = choice.add(event)
            if piece is None:
                continue
            if piece.finish is not None:
                ahead -= 1
                # After a stop string the engine is still at it.
                self._cancel(self.numbers[event.index])
            yield piece


def _weight(event: TokenEvent | Exception) -> int:
    if isinstance(event, Exception):
        return 0
    return 1 if event.logprobs is None else 1 + len(event.logprobs.top)
