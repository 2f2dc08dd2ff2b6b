"""Chooses a token from each row of logits.

Random draws are counter-based: draw number n of a sequence is a hash of its seed and n, so a seed gives
the same tokens whatever runs beside it, and across a swap.

The order of the options is vLLM V1's (``vllm/v1/sample/sampler.py``): log probabilities of the model's own
logits first; then bias and penalties, on which greedy takes the argmax; then temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.wire import Logprobs, Sampling

# What top_k, min_p and top_p keep is usually few: look for it among these before sorting the vocabulary.
_CANDIDATES = 256
_DRAW_BYTES = 8
# Colder than this, dividing logits overflows, and the result is greedy anyway.
_TEMPERATURE_MIN = 1e-4


@dataclass(frozen=True, slots=True)
class Choice:
    """How to choose one token.

    Attributes:
        sampling: the request's options.
        seed: of the sequence's draws.
        index: tokens the sequence generated before.
        tokens: ends with these ``index`` tokens; read only under a penalty, so the sequence's own list will do.
    """

    sampling: Sampling
    seed: int
    index: int
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen in one row. ``token`` is None when the row has a non-finite value."""

    token: int | None
    logprobs: Logprobs | None = None


def uniform(seed: int, index: int) -> float:
    """Draw ``index`` of the stream ``seed``: in [0, 1), 53 bits."""
    key = (seed % 2**128).to_bytes(16, "little") + index.to_bytes(_DRAW_BYTES, "little")
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=_DRAW_BYTES).digest(), "little")
    return (bits >> 11) * 2.0**-53


def sample(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Sampled]:
    """One token per row, with its log probabilities where they are asked for.

    Args:
        logits: float32 ``[rows, vocab_size]`` on the CPU.
        choices: one per row.
    """
    # Extremes carry NaN and infinities along; 15 times faster than looking at every element's finiteness.
    finite = (logits.amax(1).isfinite() & logits.amin(1).isfinite()).tolist()
    best = logits.argmax(1).tolist()
    sampled = []
    for row, choice in enumerate(choices):
        if not finite[row]:
            sampled.append(Sampled(None))
            continue
        token = best[row] if _is_plain_greedy(choice.sampling) else _choose(logits[row], choice)
        count = choice.sampling.logprobs
        sampled.append(Sampled(token, None if count is None else _logprobs(logits[row], token, count)))
    return sampled


def _is_plain_greedy(options: Sampling) -> bool:
    return options.temperature < _TEMPERATURE_MIN and not _adjusts(options)


def _adjusts(options: Sampling) -> bool:
    return bool(options.logit_bias or options.presence_penalty or options.frequency_penalty)


def _choose(logits: torch.Tensor, choice: Choice) -> int:
    if _adjusts(choice.sampling):
        logits = _adjusted(logits, choice)
    if choice.sampling.temperature < _TEMPERATURE_MIN:
        return int(logits.argmax())
    return _draw(logits, choice)


def _adjusted(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Logits with bias and penalties: OpenAI API reference, "Frequency and presence penalties".

    Only generated tokens are counted, as there; a prompt is not penalised. Token ids beyond the row are
    passed over: the generation that serves may have a smaller vocabulary than the one that took the request.
    """
    options, size = choice.sampling, len(logits)
    logits = logits.clone()
    for token, bias in options.logit_bias:
        if token < size:
            logits[token] += bias
    if options.presence_penalty or options.frequency_penalty:
        generated = choice.tokens[len(choice.tokens) - choice.index :]
        known = torch.tensor([token for token in generated if token < size], dtype=torch.int64)
        counts = known.bincount(minlength=size)
        logits -= counts * options.frequency_penalty + (counts > 0) * options.presence_penalty
    return logits


def _draw(logits: torch.Tensor, choice: Choice) -> int:
    options = choice.sampling
    probabilities = (logits.double() / options.temperature).softmax(0)
    if options.top_p < 1 or options.top_k or options.min_p:
        values, ids = _kept(probabilities, options)
    else:
        values, ids = probabilities, None
    cumulative = values.cumsum(0)
    point = uniform(choice.seed, choice.index) * float(cumulative[-1])
    picked = min(int(torch.searchsorted(cumulative, point, right=True)), len(cumulative) - 1)
    return picked if ids is None else int(ids[picked])


def _kept(probabilities: torch.Tensor, options: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids of the tokens that may be drawn, likeliest first; at least one.

    ``top_k`` and ``min_p`` (at least that share of the likeliest token's probability) each keep a head of the
    order; ``top_p`` then keeps the smallest head of that with its share of what is left.
    """
    limit = min(options.top_k or len(probabilities), len(probabilities))
    values, ids = probabilities.topk(min(limit, _CANDIDATES))
    least = options.min_p * float(values[0])
    whole = limit == len(probabilities) and not options.min_p
    enough = len(values) == limit or float(values[-1]) < least or (whole and float(values.sum()) >= options.top_p)
    if not enough:
        values, ids = (ordered[:limit] for ordered in probabilities.sort(descending=True))
    values = values[: max(int((values >= least).sum()), 1)]
    mass = 1.0 if whole else float(values.sum())
    values = values[: int((values.cumsum(0) < options.top_p * mass).sum()) + 1]
    return values, ids[: len(values)]


def _logprobs(logits: torch.Tensor, token: int, count: int) -> Logprobs:
    """Of the model's own logits, before bias, penalties and temperature (vLLM V1's ``raw_logprobs``)."""
    logprobs = logits.log_softmax(0)
    top = logprobs.topk(min(count, len(logprobs)))
    return Logprobs(float(logprobs[token]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
