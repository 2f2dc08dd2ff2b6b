"""The scheduler's promises, one by one."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool
from engine.schedule import Limits, Schedule, Sequence
from engine.table import KvSpace
from engine.wire import Sampling

SIZE = 4
OLD, NEW = 1, 2


def setup(*, blocks: int, slots: int = 4, context: int = 64) -> tuple[Schedule, BlockPool, Limits]:
    return Schedule(), BlockPool(range(2, 2 + blocks), SIZE), Limits(slots=slots, context=context, vocab_size=1000)


def request(number: int, prompt: list[int], tokens_max: int = 40) -> Sequence:
    return Sequence(number, prompt, tokens_max, Sampling(), 0)


def step(schedule: Schedule, pool: BlockPool, limits: Limits, *, serving: int = OLD, chunk: int = 4) -> list[int]:
    """Admit, compute and emit once; returns the requests that got a token."""
    space = KvSpace(serving, pool)
    schedule.admit(limits, space)
    plan = schedule.plan(space, chunk_tokens_max=chunk)
    if plan is None:
        return []
    schedule.consume(serving, plan)
    emitted = [feed.sequence for feed in plan.feeds if feed.emits]
    for sequence in emitted:
        schedule.emit(sequence, 7, limits)
    schedule.sweep()
    return [sequence.request for sequence in emitted]


@pytest.mark.parametrize(("sequences", "chunk"), [(1, 16), (4, 16), (7, 4), (30, 16), (30, 4)])
def test_a_rebuilding_generation_becomes_level_while_everybody_advances(sequences: int, chunk: int) -> None:
    schedule, pool, limits = setup(blocks=60_000, slots=sequences, context=4000)
    for number in range(sequences):
        schedule.submit(request(number, [number] * (10 + number), tokens_max=3900))
    while len(schedule.running) < sequences or any(one.lag(OLD) > 1 for one in schedule.running):
        step(schedule, pool, limits, chunk=chunk)
    known = sum(one.cached(OLD) for one in schedule.running)
    # At best a chunk a step; what was generated meanwhile has to be rebuilt as well.
    for _ in range(4 + 4 * (known // chunk + sequences)):
        plan = schedule.plan(KvSpace(OLD, pool), chunk_tokens_max=chunk)
        assert plan is not None
        assert len(plan.feeds) == sequences
        ahead = schedule.plan_ahead(plan, KvSpace(NEW, pool), chunk_tokens_max=chunk)
        assert ahead is not None
        schedule.consume(OLD, plan)
        schedule.consume(NEW, ahead)
        for feed in plan.feeds:
            schedule.emit(feed.sequence, 7, limits)
        if schedule.behind(NEW, OLD) == 0:
            break
    else:
        raise AssertionError("never level")
    # Level means that the next step of the new generation emits for everybody, as the old one's would.
    after = schedule.plan(KvSpace(NEW, pool), chunk_tokens_max=chunk)
    assert after is not None
    assert after.chunk is None
    assert all(feed.emits for feed in after.feeds)


def test_the_youngest_waits_again_when_blocks_run_out_and_loses_nothing() -> None:
    schedule, pool, limits = setup(blocks=6)
    schedule.submit(request(1, [1] * 7, tokens_max=13))
    schedule.submit(request(2, [2] * 7, tokens_max=13))
    emitted: dict[int, int] = {1: 0, 2: 0}
    for _ in range(60):
        for number in step(schedule, pool, limits):
            emitted[number] += 1
    assert emitted == {1: 13, 2: 13}
    assert schedule.counters.preemptions > 0
    assert pool.held == 0


def test_kv_of_another_generation_goes_before_anybody_waits() -> None:
    schedule, pool, limits = setup(blocks=8)
    for number in (1, 2):
        schedule.submit(request(number, [number] * 7, tokens_max=6))
        step(schedule, pool, limits)
        step(schedule, pool, limits)
    for one in schedule.running:
        plan = schedule.plan(KvSpace(OLD, pool), chunk_tokens_max=4)
        assert plan is not None
        schedule.plan_ahead(plan, KvSpace(NEW, pool), chunk_tokens_max=4)
        assert one.request in (1, 2)
    assert any(NEW in one.tables for one in schedule.running)
    while schedule.running:
        step(schedule, pool, limits)
    assert schedule.counters.preemptions == 0


def test_a_prefix_is_found_by_its_own_generation_alone() -> None:
    schedule, pool, limits = setup(blocks=20)
    prompt = list(range(10))
    for number, serving, expected in ((1, OLD, 0), (2, OLD, 8), (3, NEW, 0), (4, NEW, 8), (5, OLD, 8)):
        sequence = request(number, list(prompt), tokens_max=1)
        schedule.submit(sequence)
        while sequence.finish is None:
            step(schedule, pool, limits, serving=serving)
        assert sequence.prefix_tokens == expected
    assert schedule.counters.prefix_query_tokens == 50
    assert schedule.counters.prefix_hit_tokens == 24


def test_admission_leaves_blocks_for_those_already_running() -> None:
    schedule, pool, limits = setup(blocks=6)
    schedule.submit(request(1, [1] * 15, tokens_max=2))
    schedule.submit(request(2, [2] * 15, tokens_max=2))
    space = KvSpace(OLD, pool)
    admitted, ended = schedule.admit(limits, space)
    # Nothing is allocated yet, but the first will need four of the six blocks.
    assert ([one.request for one in admitted], ended) == ([1], [])


def test_prefix_of_non_finite_kv_is_taken_over_by_nobody() -> None:
    schedule, pool, limits = setup(blocks=20)
    first = request(1, list(range(10)))
    schedule.submit(first)
    while not step(schedule, pool, limits):
        pass
    schedule.distrust(first, OLD)
    assert first.lag(OLD) == len(first.tokens)
    second = request(2, list(range(10)))
    schedule.submit(second)
    schedule.admit(limits, KvSpace(OLD, pool))
    assert second.prefix_tokens == 0


def test_carried_kv_is_not_lost_and_is_no_prefix_of_the_new_generation() -> None:
    schedule, pool, limits = setup(blocks=20)
    first = request(1, list(range(10)), tokens_max=30)
    schedule.submit(first)
    while not step(schedule, pool, limits):
        pass
    blocks, cached = list(first.tables[OLD].blocks), first.cached(OLD)
    schedule.carry(OLD, NEW)
    assert (first.tables[NEW].blocks, first.cached(NEW), first.cached(OLD)) == (blocks, cached, 0)
    for _ in range(8):
        step(schedule, pool, limits, serving=NEW)
    second = request(2, list(first.tokens))
    schedule.submit(second)
    schedule.admit(limits, KvSpace(NEW, pool))
    assert second.prefix_tokens == 0
