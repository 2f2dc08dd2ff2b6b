"""Options that both endpoints share, checked against their limits.

Source: OpenAI API reference, "Create completion" and "Create chat completion"; ``top_k`` and ``min_p`` as in vLLM's
``SamplingParams``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import msgspec

from engine.front.refusal import RequestRefusedError
from engine.wire import Sampling

# OpenAI allows 128; every choice is a sequence of its own, and 8 is what one host batches.
_CHOICES_MAX: Final = 8
# OpenAI allows 4. Together with the length they bound the work per token.
_STOPS_MAX: Final = 4
_STOP_CHARS_MAX: Final = 256
_TEMPERATURE_MAX: Final = 2.0
_PENALTY_MAX: Final = 2.0
_BIAS_MAX: Final = 100.0
# Bounds the work per token; OpenAI's own limit.
_BIAS_TOKENS_MAX: Final = 300
_TOKEN_ID: Final = re.compile(r"(0|[1-9][0-9]{0,8})\Z")
_SEED_BOUND: Final = 1 << 63
_TOP_K_BOUND: Final = 1 << 31
# How vLLM's older clients say that top_k is off.
_TOP_K_OFF: Final = -1


class StreamOptions(msgspec.Struct):
    """``stream_options`` of a body."""

    include_usage: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """The fields both endpoints share, as the client sent them. None is the same as absent."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """What both endpoints share.

    Attributes:
        tokens_max: of one choice; None: as many as the context holds.
        sampling: of the first choice, see :meth:`samplings`.
        choices: answers to generate.
    """

    model: str | None
    tokens_max: int | None
    sampling: Sampling
    choices: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool

    def samplings(self) -> tuple[Sampling, ...]:
        """One per choice: a given seed is that of the first, the next ones count up, so no two are alike."""
        seed = self.sampling.seed
        if seed is None:
            return (self.sampling,) * self.choices
        return tuple(msgspec.structs.replace(self.sampling, seed=seed + index) for index in range(self.choices))


def read_options(body: Body, *, tokens_max: int | None, tokens_field: str, logprobs: int | None) -> Options:
    """Check the shared fields.

    Args:
        body: as decoded.
        tokens_max: the endpoint's token limit, from the field ``tokens_field``.
        tokens_field: where it came from.
        logprobs: alternatives to report per token, already checked; None: report nothing.

    Raises:
        RequestRefusedError: 400, with the field at fault.
    """
    temperature, top_p, min_p = _or(body.temperature, 1.0), _or(body.top_p, 1.0), _or(body.min_p, 0.0)
    top_k = 0 if body.top_k in (None, _TOP_K_OFF) else body.top_k
    presence, frequency = _or(body.presence_penalty, 0.0), _or(body.frequency_penalty, 0.0)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    choices = 1 if body.n is None else body.n
    streams = bool(body.stream)
    rules = (
        (tokens_max is None or tokens_max >= 1, tokens_field, "must be at least 1"),
        (0.0 <= temperature <= _TEMPERATURE_MAX, "temperature", "must be between 0 and 2"),
        (0.0 < top_p <= 1.0, "top_p", "must be above 0 and at most 1"),
        (0 <= top_k < _TOP_K_BOUND, "top_k", "must not be negative (0 and -1 turn it off)"),
        (0.0 <= min_p <= 1.0, "min_p", "must be between 0 and 1"),
        (abs(presence) <= _PENALTY_MAX, "presence_penalty", "must be between -2 and 2"),
        (abs(frequency) <= _PENALTY_MAX, "frequency_penalty", "must be between -2 and 2"),
        (body.seed is None or -_SEED_BOUND <= body.seed < _SEED_BOUND, "seed", "must fit 64 bits"),
        (1 <= choices <= _CHOICES_MAX, "n", f"must be from 1 to {_CHOICES_MAX}"),
        (len(stops) <= _STOPS_MAX, "stop", f"must be at most {_STOPS_MAX} strings"),
        (all(0 < len(stop) <= _STOP_CHARS_MAX for stop in stops), "stop", f"needs 1 to {_STOP_CHARS_MAX} characters"),
        (streams or body.stream_options is None, "stream_options", "needs stream to be true"),
    )
    for holds, field, rule in rules:
        if not holds:
            raise RequestRefusedError(f"{field} {rule}", param=field)
    return Options(
        model=body.model,
        tokens_max=tokens_max,
        sampling=Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=body.seed,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=_read_bias(body.logit_bias or {}),
            logprobs=logprobs,
        ),
        choices=choices,
        stops=stops,
        stream=streams,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _read_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs; whether the ids exist is checked against the model's vocabulary later."""
    rules = (
        (len(given) <= _BIAS_TOKENS_MAX, f"must name at most {_BIAS_TOKENS_MAX} tokens"),
        (all(_TOKEN_ID.match(token) for token in given), "must have token ids as keys"),
        (all(abs(bias) <= _BIAS_MAX for bias in given.values()), "must be between -100 and 100"),
    )
    for holds, rule in rules:
        if not holds:
            raise RequestRefusedError(f"logit_bias {rule}", param="logit_bias")
    return tuple((int(token), bias) for token, bias in given.items())
