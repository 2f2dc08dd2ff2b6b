"""The reclaim hook: when it asks for how much, and when it lets be."""

from __future__ import annotations

import pytest

from engine.governor import Memory
from engine.reclaim import BACKOFF_STEPS, LOOK_STEPS, PolicyName, ReclaimHook, ReclaimPolicy, ReclaimRefusedError

THRESHOLD = ReclaimPolicy("threshold", high=0.85, low=0.75)


def used(percent: int) -> Memory:
    return Memory(used_bytes=percent * 10, total_bytes=1000)


def hook(policy: ReclaimPolicy = THRESHOLD) -> ReclaimHook:
    made = ReclaimHook()
    made.configure(policy)
    return made


def test_hysteresis() -> None:
    reclaim = hook()
    asked = []
    for look, percent in enumerate((84, 85, 80, 76, 75, 84, 75, 86, 76, 74, 80)):
        asked.append(reclaim.observe(used(percent), look * LOOK_STEPS))
        if asked[-1]:
            reclaim.ran(1, look * LOOK_STEPS)
    # From the high mark down to the low one; below the high one again, nothing.
    assert asked == [0, 100, 50, 10, 0, 0, 0, 110, 10, 0, 0]


def test_memory_is_looked_at_every_few_steps() -> None:
    reclaim = hook()
    looks = []
    for step in range(5 * LOOK_STEPS):
        if reclaim.due(step):
            looks.append(step)
            reclaim.observe(used(10), step)
    assert looks == [n * LOOK_STEPS for n in range(5)]


def test_a_run_that_frees_nothing_is_not_repeated_soon() -> None:
    reclaim = hook()
    assert reclaim.observe(used(90), 0)
    reclaim.ran(0, 0)
    assert not any(reclaim.due(step) for step in range(BACKOFF_STEPS))
    assert reclaim.due(BACKOFF_STEPS)
    # It had given up draining: between the marks nothing is asked for.
    assert reclaim.observe(used(80), BACKOFF_STEPS) == 0


def test_the_explicit_policy_never_acts_by_itself() -> None:
    reclaim = hook(ReclaimPolicy("explicit"))
    assert not reclaim.due(10**6)
    assert reclaim.observe(used(99), 0) == 0


def test_a_new_policy_applies_at_once() -> None:
    reclaim = hook()
    reclaim.ran(0, 5)
    reclaim.configure(ReclaimPolicy("threshold", high=0.5, low=0.4))
    assert reclaim.due(6)
    assert reclaim.observe(used(60), 6) == 200


def test_runs_are_counted() -> None:
    reclaim = hook()
    reclaim.ran(7, 0)
    reclaim.ran(5, 1)
    figures = reclaim.as_dict()
    assert (figures["reclaim_runs"], figures["reclaim_freed_bytes"], figures["reclaim_last_freed_bytes"]) == (2, 12, 5)


@pytest.mark.parametrize("policy", ["explicit", "threshold"])
@pytest.mark.parametrize(("high", "low"), [(0.7, 0.8), (0.8, 0.8), (1.1, 0.5), (0.8, 0.0), (float("nan"), 0.5)])
def test_thresholds_that_contradict_each_other_are_refused(policy: PolicyName, high: float, low: float) -> None:
    with pytest.raises(ReclaimRefusedError, match="low"):
        ReclaimPolicy(policy, high, low)
