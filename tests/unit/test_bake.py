"""When a probation ends at once, and how long its window must be."""

from __future__ import annotations

import pytest

from patchctl.agent.bake import Counters, _window_s, breach
from patchctl.agent.settings import BakeLimits


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (Counters(20, 0, 0), ""),
        (Counters(20, 2, 0), "2 requests failed"),
        (Counters(20, 0, 1), "1 rows of non-finite logits"),
    ],
)
def test_breach(now: Counters, why: str) -> None:
    assert breach(Counters(10, 0, 0), now) == why


def test_failures_from_before_the_swap_do_not_count() -> None:
    assert breach(Counters(10, 5, 3), Counters(20, 5, 3)) == ""


def test_growth_must_outlast_a_heap_that_is_filling_up() -> None:
    limits = BakeLimits(bake_s=10, bake_s_max=60)
    assert _window_s(limits, "none") == 10
    assert _window_s(limits, "shown") == 20
    assert _window_s(limits, "unclear") == 60
    assert _window_s(BakeLimits(bake_s=10, bake_s_max=15), "shown") == 15
