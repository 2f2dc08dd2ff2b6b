"""The place of a growth is named; nothing is traced unless it was asked for."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from snapshots.capture import stacks
from snapshots.capture.stacks import stack_deltas, start_stacks, stop_stacks, take_stacks


@pytest.fixture
def tracing() -> Iterator[None]:
    assert start_stacks()
    yield
    stop_stacks()


def _keep(kept: list[bytearray], size: int) -> None:
    kept.append(bytearray(size))


def test_growth_has_a_place(tracing: None) -> None:
    kept: list[bytearray] = []
    _keep(kept, 10)
    before = take_stacks()
    for _ in range(8):
        _keep(kept, 50_000)
    after = take_stacks()
    assert before is not None
    assert after is not None
    largest = stack_deltas(before, after)[0]
    assert largest.stack[0].startswith(f"{__file__}:")
    assert largest.grown_bytes == pytest.approx(400_000, rel=0.05)
    assert largest.grown_blocks >= 8
    assert after.traced_bytes >= before.traced_bytes + 400_000
    assert stack_deltas(after, before)[-1].grown_bytes == -largest.grown_bytes


def test_only_the_largest_stacks_are_kept(tracing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [bytearray(100), bytearray(1000)]
    monkeypatch.setattr(stacks, "_STACKS_MAX", 1)
    found = take_stacks()
    assert found is not None
    assert len(found.totals) == 1
    assert found.left_out >= 1
    assert found.totals[0].size_bytes < found.traced_bytes
    assert kept


def test_a_trace_of_somebody_else_is_left_alone() -> None:
    assert take_stacks() is None
    tracemalloc.start(1)
    try:
        assert not start_stacks()
        assert tracemalloc.get_traceback_limit() == 1
    finally:
        tracemalloc.stop()
