"""The growth estimate finds what was planted and stays quiet over sound twins."""

# ruff: noqa: S311 - seeded noise
from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.growth import (
    GrowthEstimate,
    GrowthLimits,
    Insufficient,
    MemorySample,
    _interval_rank,
    estimate_growth,
)

_NOISE_LIMIT = 8 << 10
_TOKENS = 40


def window(
    seed: int,
    *,
    leak: float,
    requests: int = 15,
    per_request: int = 4,
    noise: int = 8 << 10,
    in_flight: int = 200 << 10,
    step: tuple[int, int] = (0, 0),
    spike: bool = False,
) -> list[MemorySample]:
    """A serving process: memory in flight saws, pages jitter upwards, `step` = (request, bytes) happens once."""
    rng = random.Random(seed)
    samples = []
    for done in range(requests):
        lowest = rng.randrange(per_request)  # not always the first sample: counters and memory are read apart
        for tick in range(per_request):
            held = 100e6 + leak * done + (step[1] if done >= step[0] else 0)
            held += in_flight * ((tick + lowest) % per_request) / per_request + rng.randrange(noise // 4096 + 1) * 4096
            if spike and done == requests // 2:
                held += 5e6
            samples.append(
                MemorySample(
                    done + tick / per_request, int(held), done, (done * per_request + tick) * _TOKENS // per_request
                )
            )
    return samples


steps = st.tuples(st.integers(1, 14), st.sampled_from([0, 1 << 20, 64 << 20, -(8 << 20)]))


@given(st.integers(0, 999), st.sampled_from([16 << 10, 64 << 10, 1 << 20]), steps, st.booleans())
def test_planted_growth_is_found(seed: int, leak: int, step: tuple[int, int], spike: bool) -> None:
    found = estimate_growth(window(seed, leak=leak, step=step, spike=spike))
    assert isinstance(found, GrowthEstimate)
    assert found.progress == "requests"
    assert found.bytes_per_request == pytest.approx(leak, rel=0.1)
    assert found.low > _NOISE_LIMIT


@given(st.integers(0, 999), steps, st.booleans(), st.integers(8, 20))
def test_sound_twins_are_quiet(seed: int, step: tuple[int, int], spike: bool, requests: int) -> None:
    step = (min(step[0], requests - 1), step[1])
    found = estimate_growth(window(seed, leak=0, requests=requests, step=step, spike=spike))
    assert isinstance(found, GrowthEstimate)
    assert abs(found.bytes_per_request) <= 4096
    assert found.high <= _NOISE_LIMIT


@given(st.integers(0, 999), st.integers(1, 14), st.sampled_from([1 << 20, -(8 << 20)]))
def test_one_step_is_named(seed: int, at: int, size: int) -> None:
    found = estimate_growth(window(seed, leak=0, step=(at, size)))
    assert isinstance(found, GrowthEstimate)
    (step,) = found.steps
    assert step.progress == at
    assert step.bytes == pytest.approx(size, rel=0.02)


def test_repeated_jumps_are_growth_not_steps() -> None:
    samples = [MemorySample(done, 100_000_000 + (done // 4) * (4 << 20), done, done * _TOKENS) for done in range(16)]
    found = estimate_growth(samples)
    assert isinstance(found, GrowthEstimate)
    assert not found.steps
    assert found.bytes_per_request > 256 << 10
    assert found.low > 0


@given(st.integers(0, 999), st.sampled_from([0, 1 << 20]))
def test_tokens_stand_in_for_few_long_requests(seed: int, leak: int) -> None:
    """Four requests of 400 tokens: too few levels, so bytes per token times tokens per request."""
    rng = random.Random(seed)
    samples = []
    for tick in range(64):
        done = tick * 4 // 64
        held = 100_000_000 + leak * tick * 4 // 64 + rng.randrange(3) * 4096
        samples.append(MemorySample(tick / 4, held, done, tick * 25))
    found = estimate_growth(samples)
    assert isinstance(found, GrowthEstimate)
    assert found.progress == "tokens"
    # 3 of the 4 requests completed inside the window, so a request counts 525 tokens instead of 400.
    assert found.bytes_per_request == pytest.approx(leak * 525 / 400, rel=0.1, abs=8192)


def test_many_requests_are_pooled() -> None:
    samples = [MemorySample(n / 100, 10_000_000 + 4096 * n, n, n * _TOKENS) for n in range(2000)]
    found = estimate_growth(samples)
    assert isinstance(found, GrowthEstimate)
    assert found.levels == GrowthLimits().levels_max
    assert found.bytes_per_request == pytest.approx(4096, rel=0.01)


def test_samples_in_flight_only_raise() -> None:
    """A tall sawtooth in flight does not look like growth, nor hide it."""
    for leak in (0, 16 << 10):
        found = estimate_growth(window(1, leak=leak, in_flight=50 << 20))
        assert isinstance(found, GrowthEstimate)
        assert found.bytes_per_request == pytest.approx(leak, rel=0.1, abs=1024)


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "0 samples"),
        (window(1, leak=0, requests=2, per_request=4), "8 samples"),
        (window(1, leak=0, requests=2, per_request=8), "1 requests completed"),
        (list(reversed(window(1, leak=0))), "restart"),
        ([MemorySample(t, 1, t // 4, 0) for t in range(16)], "too few levels"),
    ],
)
def test_thin_evidence_is_insufficient(samples: list[MemorySample], reason: str) -> None:
    found = estimate_growth(samples)
    assert isinstance(found, Insufficient)
    assert reason in found.reason


def test_interval_ranks_follow_kendall() -> None:
    """At n = 10, P(inversions <= 10) = 0.0143 and P(<= 11) = 0.0233 and P(<= 12) = 0.0363 (Kendall's tables)."""
    assert _interval_rank(5, 0.05) == 1
    assert _interval_rank(10, 0.05) == 12
    # The normal limit at n = 48: N/2 - 1.96 sd.
    pairs, sd = 48 * 47 / 2, math.sqrt(48 * 47 * 101 / 18) / 2
    assert _interval_rank(48, 0.05) == pytest.approx(pairs / 2 - 1.96 * sd, abs=2)


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(400):
        samples = [MemorySample(n, int(1e9 + 10_000 * n + rng.gauss(0, 60_000)), n, n) for n in range(15)]
        found = estimate_growth(samples)
        assert isinstance(found, GrowthEstimate)
        covered += found.low <= 10_000 <= found.high
    assert 370 <= covered <= 396
