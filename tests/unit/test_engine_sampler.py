"""Sampling: greedy, what each option keeps, penalties, log probabilities, and draws that seed and index decide."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch

from engine.sampler import Choice, sample, uniform
from engine.wire import Logprobs, Sampling


def rows(count: int, vocab: int = 1000) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(1))


def tokens(logits: torch.Tensor, choices: list[Choice]) -> list[int | None]:
    return [sampled.token for sampled in sample(logits, choices)]


def of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([[math.log(probability) for probability in probabilities]])


def drawn(logits: torch.Tensor, sampling: Sampling, count: int = 200) -> set[int | None]:
    return {token for index in range(count) for token in tokens(logits, [Choice(sampling, 1, index)])}


def test_greedy_is_the_argmax() -> None:
    logits = rows(3)
    assert tokens(logits, [Choice(Sampling(), 0, 0)] * 3) == logits.argmax(1).tolist()


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.01}, {"frequency_penalty": 1.0}, {"logprobs": 2}],
)
def test_a_seed_gives_the_same_token_in_any_batch(options: dict[str, float]) -> None:
    logits = rows(5)
    choices = [Choice(Sampling(temperature=1.0, **options), seed, 3, [5, 5, 7]) for seed in range(5)]  # type: ignore[arg-type]
    together = sample(logits, choices)
    assert [sample(logits[i : i + 1], choices[i : i + 1])[0] for i in range(5)] == together
    assert len({uniform(1, index) for index in range(1000)}) == 1000


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**200])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= uniform(seed, 0) < 1


def test_draws_follow_the_distribution() -> None:
    logits = of(0.7, 0.2, 0.1)
    counts = [0, 0, 0]
    for index in range(3000):
        (token,) = tokens(logits, [Choice(Sampling(temperature=1.0), 7, index)])
        assert token is not None
        counts[token] += 1
    # Four standard deviations of a binomial of 3000.
    assert counts[0] == pytest.approx(2100, abs=100)
    assert counts[2] == pytest.approx(300, abs=66)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert drawn(of(0.5, 0.3, 0.2), Sampling(1.0, top_p=0.6)) == {0, 1}
    assert drawn(of(0.5, 0.3, 0.2), Sampling(1.0, top_p=0.0)) == {0}


def test_top_k_keeps_the_likeliest() -> None:
    logits = of(0.2, 0.3, 0.1, 0.4)
    assert drawn(logits, Sampling(1.0, top_k=2)) == {1, 3}
    assert drawn(logits, Sampling(1.0, top_k=1)) == {3}
    assert drawn(logits, Sampling(1.0, top_k=99)) == {0, 1, 2, 3}


def test_min_p_is_a_share_of_the_likeliest() -> None:
    logits = of(0.5, 0.3, 0.2)
    assert drawn(logits, Sampling(1.0, min_p=0.5)) == {0, 1}
    assert drawn(logits, Sampling(1.0, min_p=1.0)) == {0}


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    # Of 0.4 and 0.3 the first is 0.57: enough for 0.5, though it is not of the whole.
    logits = of(0.4, 0.3, 0.2, 0.1)
    assert drawn(logits, Sampling(1.0, top_p=0.5)) == {0, 1}
    assert drawn(logits, Sampling(1.0, top_p=0.5, top_k=2)) == {0}
    assert drawn(logits, Sampling(1.0, top_p=0.5, min_p=0.6)) == {0}


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"top_p": 0.99}, 4950), ({"top_k": 4000}, 4000), ({"min_p": 0.5}, 5000), ({"top_k": 4000, "top_p": 0.5}, 2000)],
)
def test_a_flat_distribution_looks_beyond_the_first_candidates(options: dict[str, float], kept: int) -> None:
    sampling = Sampling(1.0, **options)  # type: ignore[arg-type]
    flat = torch.zeros(1, 5000)
    # The last kept token is drawn by a point close to 1; no draw may leave the kept ones.
    assert 300 < len(drawn(flat, sampling, 400)) <= kept


def by_hand(logits: torch.Tensor, sampling: Sampling, generated: Iterable[int]) -> torch.Tensor:
    """The formula of OpenAI's API reference, a token at a time."""
    adjusted = logits.clone()
    for token, bias in sampling.logit_bias:
        adjusted[token] += bias
    generated = list(generated)
    for token in set(generated):
        adjusted[token] -= generated.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    return adjusted


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=2.0),
        Sampling(frequency_penalty=0.7),
        Sampling(frequency_penalty=-1.5, presence_penalty=1.0),
        Sampling(logit_bias=((3, 100.0), (4, 99.0)), frequency_penalty=2.0),
    ],
)
def test_penalties_count_generated_tokens_only(sampling: Sampling) -> None:
    (row,) = rows(1, 50)
    sequence = row.topk(50).indices.tolist()[:10]  # a prompt of the likeliest, which must not be penalised
    for index in range(40):
        expected = int(by_hand(row, sampling, sequence[10:]).argmax())
        (token,) = tokens(row[None], [Choice(sampling, 0, index, sequence)])
        assert token == expected
        sequence.append(token)


def test_bias_bans_and_forces() -> None:
    logits = of(0.6, 0.3, 0.1)
    assert drawn(logits, Sampling(1.0, logit_bias=((0, -100.0),))) == {1, 2}
    assert drawn(logits, Sampling(0.0, logit_bias=((2, 100.0),)), 1) == {2}


def test_token_ids_of_a_larger_vocabulary_are_passed_over() -> None:
    sampling = Sampling(logit_bias=((3, 100.0),), presence_penalty=1.0)
    assert tokens(of(0.6, 0.3, 0.1), [Choice(sampling, 0, 2, [3, 0])]) == [1]


def test_logits_are_left_as_they_were() -> None:
    logits = rows(1)
    before = logits.clone()
    sample(logits, [Choice(Sampling(1.0, logit_bias=((1, 5.0),), presence_penalty=1.0, logprobs=3), 0, 1, [4])])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 3}, {"logit_bias": ((17, 100.0),)}])
def test_log_probabilities_are_of_the_models_own_logits(options: dict[str, float]) -> None:
    (row,) = rows(1)
    expected = row.double().log_softmax(0)
    (sampled,) = sample(row[None], [Choice(Sampling(**options, logprobs=4), 1, 0)])  # type: ignore[arg-type]
    assert sampled.token is not None
    assert isinstance(sampled.logprobs, Logprobs)
    assert sampled.logprobs.chosen == pytest.approx(float(expected[sampled.token]), abs=1e-5)
    assert [token for token, _ in sampled.logprobs.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-5)


def test_no_alternatives_and_no_log_probabilities() -> None:
    (none, chosen) = sample(rows(2), [Choice(Sampling(), 0, 0), Choice(Sampling(logprobs=0), 0, 0)])
    assert none.logprobs is None
    assert chosen.logprobs is not None
    assert chosen.logprobs.top == ()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1e-30), Sampling(1.0), Sampling(logprobs=1, top_k=1)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 17, 4999])
def test_a_row_that_is_not_finite_has_no_token(sampling: Sampling, value: float, place: int) -> None:
    logits = rows(2, 5000)
    logits[0, place] = value
    first, second = sample(logits, [Choice(sampling, 1, 0)] * 2)
    assert (first.token, first.logprobs) == (None, None)
    assert second.token is not None
