"""Chooses a token from each row of logits.

Random draws are counter-based: draw number n of a sequence is a hash of its seed and n, so a seed gives
the same tokens whatever runs beside it, and across a swap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.wire import Sampling

# The nucleus of a peaked distribution is small: look for it among these before sorting the vocabulary.
_NUCLEUS_TOKENS = 256
_DRAW_BYTES = 8
# Colder than this, dividing logits overflows, and the result is greedy anyway.
_TEMPERATURE_MIN = 1e-4


@dataclass(frozen=True, slots=True)
class Choice:
    """How to choose one token: options, the sequence's seed, and how many it drew before."""

    sampling: Sampling
    seed: int
    index: int


def uniform(seed: int, index: int) -> float:
    """Draw ``index`` of the stream ``seed``: in [0, 1), 53 bits."""
    key = (seed % 2**128).to_bytes(16, "little") + index.to_bytes(_DRAW_BYTES, "little")
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=_DRAW_BYTES).digest(), "little")
    return (bits >> 11) * 2.0**-53


def _nucleus(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids of the smallest set of most likely tokens that reaches ``top_p``."""
    values, ids = probabilities.topk(min(_NUCLEUS_TOKENS, probabilities.numel()))
    if float(values.sum()) < top_p:
        values, ids = probabilities.sort(descending=True)
    kept = int((values.cumsum(0) < top_p).sum()) + 1
    return values[:kept], ids[:kept]


def _draw(logits: torch.Tensor, choice: Choice) -> int:
    probabilities = (logits.double() / choice.sampling.temperature).softmax(0)
    if choice.sampling.top_p < 1:
        values, ids = _nucleus(probabilities, choice.sampling.top_p)
    else:
        values, ids = probabilities, None
    cumulative = values.cumsum(0)
    point = uniform(choice.seed, choice.index) * float(cumulative[-1])
    picked = min(int(torch.searchsorted(cumulative, point, right=True)), len(cumulative) - 1)
    return picked if ids is None else int(ids[picked])


def sample(logits: torch.Tensor, choices: Sequence[Choice]) -> list[int | None]:
    """One token per row; None for a row with a non-finite value.

    Args:
        logits: float32 ``[rows, vocab_size]`` on the CPU.
        choices: one per row.
    """
    finite = logits.isfinite().all(1).tolist()
    best = logits.argmax(1).tolist()
    tokens: list[int | None] = []
    for row, choice in enumerate(choices):
        if not finite[row]:
            tokens.append(None)
        else:
            tokens.append(best[row] if choice.sampling.temperature < _TEMPERATURE_MIN else _draw(logits[row], choice))
    return tokens
