"""The judgement of a figure, and what windows, rates and texts are reduced to."""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.figures import Figure
from tests.benchmarks.identity import compare
from tests.benchmarks.spans import Span, allowed_ms, decode_rate, gaps_of, inside
from tests.benchmarks.streams import Ask, Response


@pytest.mark.parametrize(
    ("value", "at_most", "at_least", "met"),
    [
        (10.0, 1.0, None, True),
        (10.1, 1.0, None, False),
        (9.0, None, 0.9, True),
        (8.9, None, 0.9, False),
        (99.0, None, None, None),
    ],
)
def test_a_target_bounds_the_ratio(
    value: float, at_most: float | None, at_least: float | None, met: bool | None
) -> None:
    assert Figure("speed", value, "", "limit", 10.0, at_most, at_least).met is met


def test_what_was_not_measured_meets_no_target() -> None:
    nothing = Figure("gap", math.nan, "ms", "baseline", 10.0, at_most=1.0)
    assert nothing.met is False
    assert nothing.as_dict()["value"] is None
    assert Figure("failed", 0.0, "", "requests", 0.0, at_most=0.0).met is False


def test_none_failed_of_many_meets_zero() -> None:
    assert Figure("failed", 0.0, "", "requests", 100.0, at_most=0.0).met is True


def test_gaps_belong_to_the_window_they_end_in() -> None:
    gaps = gaps_of([[0, 10_000_000, 40_000_000], [5_000_000]])
    assert inside(gaps, Span(1, 10_000_000)) == [10.0]
    assert inside(gaps, Span(0, 1), Span(20_000_000, 50_000_000)) == [30.0]


def test_allowed_gap_is_the_larger_of_p99_and_twice_the_median() -> None:
    assert allowed_ms([10.0] * 100) == 20.0
    assert allowed_ms([10.0] * 97 + [50.0] * 3) == 50.0


def test_decode_rate_counts_only_while_every_sequence_decodes() -> None:
    second = 1_000_000_000
    early, late = [0, second, 2 * second, 3 * second], [second, 2 * second]
    assert decode_rate([early, late]) == pytest.approx(2.0)


def _response(ask: Ask, text: str, begin_ns: int, end_ns: int) -> Response:
    return Response(ask, begin_ns, [end_ns], text, finish="length")


def test_texts_that_crossed_a_swap_are_compared_with_those_that_did_not() -> None:
    ask, other = Ask("a", 8), Ask("b", 8)
    same, changed = [Span(100, 200)], [Span(500, 600)]
    unswapped = _response(ask, "sea", 0, 50)
    equal, different = _response(ask, "sea", 90, 110), _response(ask, "lake", 150, 250)
    left_out = _response(ask, "river", 550, 560)
    found = compare([unswapped, equal, different, left_out], same, changed)
    assert (found.compared, found.equal, found.ambiguous, found.complete) == (2, 1, 0, True)
    assert not compare([_response(other, "x", 90, 110), unswapped], same, changed).complete
