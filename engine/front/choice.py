"""One choice of a response: its tokens turned into text, stop strings cut off."""

from __future__ import annotations

from dataclasses import dataclass

from engine.front.detokenize import Detokenizer
from engine.front.logprobs import TokenLogprobs
from engine.front.metrics import Failure, Finish
from engine.front.stops import StopMatcher
from engine.wire import FinishReason, Logprobs


class ResponseFailedError(Exception):
    """The response cannot be completed. ``code`` is a stable identifier."""

    def __init__(self, code: Failure, what: str) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of choice ``index``, or only its finish (token -1), and the generation that made it."""

    generation: int
    index: int
    token: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of choice ``index`` for the client; ``finish`` is set on its last piece."""

    index: int
    text: str
    finish: Finish | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class Choice:
    """Follows one choice. ``finish`` is set once it ended: later tokens are not for it any more."""

    __slots__ = ("_chars", "_detokenizer", "_index", "_matcher", "finish")

    def __init__(self, index: int, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self.finish: Finish | None = None
        self._index = index
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._chars = 0

    def add(self, event: TokenEvent) -> Piece | None:
        """What became certain with ``event``; None while that is nothing.

        Raises:
            ResponseFailedError: the engine gave the choice up.
        """
        assert self.finish is None
        if event.finish == "error":
            raise ResponseFailedError("engine_error", "the engine could not complete the request")
        if event.finish == "cancelled":
            raise ResponseFailedError("engine_cancelled", "the engine ended the request before it was complete")
        logprobs: tuple[TokenLogprobs, ...] = ()
        text = ""
        if event.token >= 0:
            if event.logprobs is not None:
                logprobs = (TokenLogprobs(event.token, self._chars, event.logprobs),)
            text = self._detokenizer.add(event.token)
            self._chars += len(text)
        if event.finish is not None:
            text += self._detokenizer.finish()
        text, stopped = self._matcher.add(text)
        self.finish = "stop" if stopped else event.finish
        if self.finish is not None and not stopped:
            text += self._matcher.finish()
        if not text and not logprobs and self.finish is None:
            return None
        return Piece(self._index, text, self.finish, logprobs)
