"""The demo's figures, from what clients and journal wrote down."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from patchctl.demo.measure import gaps_between, quantile, step_data, step_times_ms, step_window, swap_gaps
from patchctl.demo.response import Response

MS = 1_000_000


def transaction(*steps: tuple[str, str, int, dict[str, Any]]) -> dict[str, Any]:
    return {"steps": [{"step": s, "phase": p, "at_unix_ns": at * MS, "data": d} for s, p, at, d in steps]}


def test_gaps_are_counted_where_they_end() -> None:
    response = Response(0, [0, 100 * MS, 400 * MS, 450 * MS])
    gaps = gaps_between([response], 200 * MS, 400 * MS)
    assert (gaps.count, gaps.max_ms) == (1, 300.0)
    assert gaps_between([response], 401 * MS, 449 * MS).count == 0


def test_gaps_never_span_two_responses() -> None:
    responses = [Response(0, [0, 10 * MS]), Response(0, [5000 * MS, 5010 * MS])]
    assert gaps_between(responses, 0, 10_000 * MS).max_ms == 10.0


def test_swap_window_reaches_past_the_step() -> None:
    done = transaction(("swap", "intent", 1000, {}), ("swap", "ok", 1010, {"exchange_us": 1.5}))
    slow = Response(0, [900 * MS, 2000 * MS])
    found = swap_gaps([slow], done, "swap")
    assert found is not None
    assert found.max_ms == 1100.0
    assert swap_gaps([slow], done, "rollback") is None
    assert step_data(done, "swap") == {"exchange_us": 1.5}
    assert step_times_ms(done) == {"swap": 10.0}


def test_a_step_that_never_ended_has_no_window() -> None:
    assert step_window(transaction(("bake", "intent", 1, {})), "bake") is None


def test_no_gaps_is_not_zero() -> None:
    assert math.isnan(gaps_between([], 0, 1).max_ms)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_quantile_is_the_smallest_value_that_covers(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert sum(value <= found for value in values) >= q * len(values) - 1e-9
    assert sum(value < found for value in values) < q * len(values) + 1e-9
