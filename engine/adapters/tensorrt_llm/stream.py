"""From TensorRT-LLM's growing outputs to the wire's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine.wire import FinishReason, Logprobs, Submit, Token

# ``not_finished`` only ends the first half of disaggregated serving, which we never ask for.
_FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "cancelled", "timeout": "error"}


class Completion(Protocol):
    """The part of ``CompletionOutput`` that is read."""

    token_ids: Sequence[int]
    logprobs: Sequence[Any] | None
    finish_reason: str | None


class TokenStream:
    """One request's tokens, in order, each once.

    TensorRT-LLM hands out one object that grows; it may or may not include the token that ended the sequence.
    """

    def __init__(self, request: Submit) -> None:
        self._request = request
        self._count = 0
        self.finished = False

    def advance(self, completion: Completion, *, ended: bool) -> tuple[Token, ...]:
        """What is new in ``completion``; ``ended`` when the engine will say no more."""
        fresh = list(completion.token_ids[self._count :])
        stop = next((at for at, token in enumerate(fresh) if token in self._request.stop_tokens), len(fresh))
        tokens = [
            Token(self._request.request, token, logprobs=self._logprobs(completion, self._count + at, token))
            for at, token in enumerate(fresh[:stop])
        ]
        self._count += stop
        finish: FinishReason | None = None
        if stop < len(fresh):
            finish = "stop"
        elif ended or completion.finish_reason is not None:
            finish = _FINISH.get(completion.finish_reason or "cancelled", "error")
        if finish is not None:
            self.finished = True
            tokens.append(Token(self._request.request, -1, finish))
        return tuple(tokens)

    def _logprobs(self, completion: Completion, at: int, token: int) -> Logprobs | None:
        wanted = self._request.sampling.logprobs
        if wanted is None or not completion.logprobs or at >= len(completion.logprobs):
            return None
        entry = completion.logprobs[at]
        if not isinstance(entry, Mapping):
            # Some versions give the chosen token's value alone.
            return Logprobs(float(entry))
        values = {int(key): float(value.logprob) for key, value in entry.items()}
        if token not in values:
            return None
        likeliest = sorted(values.items(), key=lambda pair: -pair[1])[:wanted]
        return Logprobs(values[token], tuple(likeliest))
