"""What an idle process teaches: movement that comes back, never a leak, never the load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from snapshots.growth import MemorySample
from snapshots.noise import IdleNoise, learn_noise, margin_per_request

_PERIOD_S = 0.1


def _idle(values: list[int], *, start_s: float = 0.0, requests: int = 5) -> list[MemorySample]:
    return [MemorySample(start_s + i * _PERIOD_S, v, requests, requests * 40) for i, v in enumerate(values)]


def test_movement_that_comes_back_is_noise() -> None:
    wave = [10**8 + (65536 if i % 7 == 3 else 0) for i in range(40)]
    assert learn_noise(_idle(wave)) == IdleNoise(65536, 1)


@given(rate=st.integers(-100_000, 100_000), count=st.integers(20, 60))
def test_a_leak_in_the_background_teaches_no_noise(rate: int, count: int) -> None:
    assert learn_noise(_idle([10**9 + rate * i for i in range(count)])) == IdleNoise(0, 1)


@given(st.lists(st.integers(0, 10**6), min_size=20, max_size=40), st.integers(-50_000, 50_000))
def test_noise_is_never_more_than_the_range(values: list[int], offset: int) -> None:
    found = learn_noise(_idle(values))
    assert found is not None
    assert 0 <= found.bytes <= max(values) - min(values)
    assert learn_noise(_idle([value + offset for value in values])) == found


def test_load_is_not_idle() -> None:
    busy = [MemorySample(i * _PERIOD_S, 10**8 + i % 3 * 10**6, i // 4, i * 10) for i in range(100)]
    assert learn_noise(busy) is None
    assert learn_noise(busy[:1]) is None
    assert learn_noise([]) is None


def test_what_a_request_gives_back_after_its_end_is_not_noise() -> None:
    settling = [10**8 + 5_000_000] * 5 + [10**8] * 20
    assert learn_noise(_idle(settling)) == IdleNoise(0, 1)


def test_pauses_between_two_requests_are_part_of_the_load() -> None:
    samples = [one for n in range(20) for one in _idle([10**8 + n, 10**8], start_s=float(n), requests=n)]
    assert learn_noise(samples) is None


def test_each_span_counts_by_itself() -> None:
    first = _idle([10**8 + (8192 if i == 12 else 0) for i in range(30)])
    second = _idle([2 * 10**8 + (4096 if i == 12 else 0) for i in range(30)], start_s=10.0, requests=9)
    assert learn_noise(first + second) == IdleNoise(8192, 2)


@given(st.integers(0, 10**7), st.integers(0, 500), st.integers(0, 10**5))
def test_the_margin_shrinks_with_requests_and_never_below_the_fixed_one(noise: int, requests: int, fixed: int) -> None:
    margin = margin_per_request(IdleNoise(noise, 1), requests, fixed)
    assert margin >= fixed == margin_per_request(None, requests, fixed)
    assert margin <= max(fixed, noise)
    assert margin_per_request(IdleNoise(noise, 1), requests + 1, fixed) <= margin
