"""Sampling: greedy, nucleus, and draws that depend on seed and index alone."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sampler import Choice, sample, uniform
from engine.wire import Sampling


def rows(count: int, vocab: int = 1000) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(1))


def test_greedy_is_the_argmax() -> None:
    logits = rows(3)
    assert sample(logits, [Choice(Sampling(), 0, 0)] * 3) == logits.argmax(1).tolist()


def test_a_seed_gives_the_same_token_in_any_batch() -> None:
    logits = rows(5)
    choices = [Choice(Sampling(temperature=1.0, top_p=0.9), seed, 3) for seed in range(5)]
    together = sample(logits, choices)
    assert [sample(logits[i : i + 1], choices[i : i + 1])[0] for i in range(5)] == together
    assert len({uniform(1, index) for index in range(1000)}) == 1000


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**200])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= uniform(seed, 0) < 1


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[math.log(0.7), math.log(0.2), math.log(0.1)]])
    counts = [0, 0, 0]
    for index in range(3000):
        (token,) = sample(logits, [Choice(Sampling(temperature=1.0), 7, index)])
        assert token is not None
        counts[token] += 1
    # Four standard deviations of a binomial of 3000.
    assert counts[0] == pytest.approx(2100, abs=100)
    assert counts[2] == pytest.approx(300, abs=66)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]])
    drawn = {sample(logits, [Choice(Sampling(1.0, 0.6), 1, index)])[0] for index in range(200)}
    assert drawn == {0, 1}
    drawn = {sample(logits, [Choice(Sampling(1.0, 0.0), 1, index)])[0] for index in range(50)}
    assert drawn == {0}


def test_a_flat_distribution_looks_beyond_the_first_candidates() -> None:
    drawn = {sample(torch.zeros(1, 5000), [Choice(Sampling(1.0, 0.99), 1, index)])[0] for index in range(400)}
    assert len(drawn) > 300


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_token(temperature: float, value: float) -> None:
    logits = rows(2)
    logits[0, 17] = value
    first, second = sample(logits, [Choice(Sampling(temperature), 1, 0)] * 2)
    assert first is None
    assert second is not None
