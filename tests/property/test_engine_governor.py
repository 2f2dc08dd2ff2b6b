"""The staging rule under random figures, and its words in chosen cases."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.governor import STAGE_PERCENT_MAX, Freeable, Memory, MemoryRefusedError, Need, StagePlan, plan_stage

GIB = 1 << 30
SIZES = st.integers(0, 400 * GIB)
MEMORIES = st.builds(Memory, used_bytes=SIZES, total_bytes=st.integers(1, 400 * GIB))
NEEDS = st.builds(
    Need,
    weights_bytes=SIZES,
    graphs_bytes=SIZES,
    workspace_bytes=st.integers(0, GIB),
    copy_bytes=st.none() | st.integers(0, 64 << 20),
)
FREEABLES = st.builds(Freeable, prefix_kv_bytes=SIZES, retired_bytes=SIZES, kv_shrink_bytes=SIZES)
MODES = st.sampled_from(["auto", "exchange", "copy"])
ORDER = ["reclaim_prefix_kv", "retire_generations", "shrink_kv"]


def decide(memory: Memory, need: Need, freeable: Freeable, mode: str) -> StagePlan | None:
    try:
        return plan_stage(memory, need, freeable, commit_mode=mode)  # type: ignore[arg-type]
    except MemoryRefusedError:
        return None


@settings(max_examples=500, deadline=None)
@given(MEMORIES, NEEDS, FREEABLES, MODES)
def test_nothing_is_staged_above_the_limit(memory: Memory, need: Need, freeable: Freeable, mode: str) -> None:
    plan = decide(memory, need, freeable, mode)
    if plan is None:
        return
    freed = sum(size for _, size in plan.relief)
    if plan.commit_mode == "exchange":
        added = need.weights_bytes + 3 * need.graphs_bytes // 2 + need.workspace_bytes
    else:
        assert mode != "exchange"
        assert need.copy_bytes is not None
        added = need.copy_bytes + need.workspace_bytes
    assert plan.peak_bytes == memory.used_bytes - freed + added
    assert 100 * plan.peak_bytes <= STAGE_PERCENT_MAX * memory.total_bytes


@settings(max_examples=500, deadline=None)
@given(MEMORIES, NEEDS, FREEABLES, MODES)
def test_no_more_is_freed_than_needed(memory: Memory, need: Need, freeable: Freeable, mode: str) -> None:
    plan = decide(memory, need, freeable, mode)
    if plan is None or not plan.relief:
        return
    names = [name for name, _ in plan.relief]
    assert names == sorted(names, key=ORDER.index)
    assert all(size > 0 for _, size in plan.relief)
    assert plan.peak_bytes + plan.relief[-1][1] > memory.limit_bytes, "the last step was not needed"


@settings(max_examples=500, deadline=None)
@given(MEMORIES, NEEDS, FREEABLES, MODES, SIZES)
def test_more_memory_never_turns_yes_into_no(
    memory: Memory, need: Need, freeable: Freeable, mode: str, more: int
) -> None:
    plan = decide(memory, need, freeable, mode)
    if plan is None:
        return
    larger = decide(Memory(memory.used_bytes, memory.total_bytes + more), need, freeable, mode)
    emptier = decide(Memory(max(0, memory.used_bytes - more), memory.total_bytes), need, freeable, mode)
    for better in (larger, emptier):
        assert better is not None
        assert len(better.relief) <= len(plan.relief) or better.commit_mode == "exchange" != plan.commit_mode
        # An exchange is never given up for a copy because there is more memory.
        assert (plan.commit_mode, better.commit_mode) != ("exchange", "copy")


UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def bytes_of(text: str) -> list[float]:
    return [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) (B|KiB|MiB|GiB)", text)]


@settings(max_examples=300, deadline=None)
@given(MEMORIES, NEEDS, FREEABLES)
def test_the_refusals_numbers_add_up(memory: Memory, need: Need, freeable: Freeable) -> None:
    with_message = decide(memory, need, freeable, "exchange")
    if with_message is not None:
        return
    with pytest.raises(MemoryRefusedError) as refused:
        plan_stage(memory, need, freeable, commit_mode="exchange")
    used, weights, graphs, estimate, workspace, peak, limit, total, *freed, short = bytes_of(str(refused.value))
    close = 0.002 * GIB  # numbers are printed with three decimals
    assert abs(used + weights + graphs + workspace - peak) <= close
    assert abs(1.5 * estimate - graphs) <= close
    assert abs(0.85 * total - limit) <= close
    assert len(freed) == 3
    assert abs(peak - sum(freed) - limit - short) <= close
    assert short > 0


def test_the_order_of_ways_out() -> None:
    memory = Memory(used_bytes=70 * GIB, total_bytes=100 * GIB)
    need = Need(weights_bytes=20 * GIB, graphs_bytes=2 * GIB, workspace_bytes=0, copy_bytes=GIB)
    assert decide(Memory(60 * GIB, 100 * GIB), need, Freeable(), "auto") == StagePlan(
        "exchange",
        (),
        83 * GIB,
        "used 60.000 GiB + weights 20.000 GiB + graphs 3.000 GiB (1.5 * 2.000 GiB) + workspace 0 B = 83.000 GiB, "
        "limit 85.000 GiB (85 % of 100.000 GiB)",
    )
    plan = decide(memory, need, Freeable(prefix_kv_bytes=5 * GIB, retired_bytes=6 * GIB), "auto")
    assert plan is not None
    assert plan.relief == (("reclaim_prefix_kv", 5 * GIB), ("retire_generations", 6 * GIB))
    # Freeing does not help: weights are overwritten in place, and nothing is freed for it in vain.
    plan = decide(memory, need, Freeable(prefix_kv_bytes=GIB), "auto")
    assert plan is not None
    assert (plan.commit_mode, plan.relief) == ("copy", ())
    assert decide(memory, need, Freeable(prefix_kv_bytes=GIB), "exchange") is None
    with pytest.raises(MemoryRefusedError, match="copy: not possible"):
        plan_stage(memory, Need(20 * GIB, 0, 0), Freeable())


def test_exactly_at_the_limit_is_allowed() -> None:
    assert decide(Memory(80, 100), Need(5, 0, 0), Freeable(), "exchange") is not None
    assert decide(Memory(80, 100), Need(6, 0, 0), Freeable(), "exchange") is None
