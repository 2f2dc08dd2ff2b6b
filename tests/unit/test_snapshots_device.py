"""The allocator's snapshot: parsed strictly, its figures by name, growth by pool and stack; the driver's view."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.device import allocator
from snapshots.device.allocator import (
    NO_PYTHON_STACK,
    NO_STACK,
    AllocatorSnapshotError,
    parse_allocator,
)
from snapshots.device.allocator_file import load_allocator
from snapshots.device.fragmentation import pool_figures, stack_growth
from snapshots.device.nvml import read_driver_memory

_DATA = Path(os.environ.get("PATCHCTL_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
_REAL = _DATA / "torch-allocator" / "medium_128_inference.pickle"

_MIB = 1 << 20


def _frame(line: int, name: str, file: str = "/srv/model.py") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def _block(address: int, size: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size - 100, "state": state, "frames": [], **more}


def _segment(address: int, blocks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    size = sum(block["size"] for block in blocks)
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "blocks": blocks,
        **more,
    }


def _sample() -> list[dict[str, Any]]:
    attention = [_frame(1, "at::empty", "x.cpp"), _frame(7, "attention"), _frame(20, "forward")]
    return [
        _segment(0, [_block(0, 4 * _MIB, frames=attention), _block(4 * _MIB, 2 * _MIB, "inactive")]),
        _segment(64 * _MIB, [_block(64 * _MIB, 6 * _MIB, "inactive")]),
        _segment(
            128 * _MIB,
            [_block(128 * _MIB, _MIB), _block(129 * _MIB, _MIB, "active_awaiting_free", frames=[_frame(1, "f", "??")])],
            segment_pool_id=(0, 3),
        ),
    ]


def test_figures_by_pool() -> None:
    default, private = pool_figures(parse_allocator(_sample()))
    assert (default.pool, private.pool) == ((0, 0), (0, 3))
    assert (default.reserved_bytes, default.active_bytes, default.free_bytes) == (12 * _MIB, 4 * _MIB, 8 * _MIB)
    assert default.largest_free_bytes == default.releasable_bytes == 6 * _MIB
    assert default.unused_share == pytest.approx(1 - 4 / 12)
    assert default.scattered_share == pytest.approx(1 - 6 / 8)
    assert default.rounding_share == pytest.approx(100 / (4 * _MIB))
    assert (private.awaiting_free_bytes, private.active_bytes, private.free_bytes) == (_MIB, 2 * _MIB, 0)
    assert (private.unused_share, private.scattered_share, private.releasable_bytes) == (0, 0, 0)


def test_stacks_keep_python_frames_innermost_first() -> None:
    blocks = [block for segment in parse_allocator(_sample()).segments for block in segment.blocks]
    assert blocks[0].stack == ("model.py:7:attention", "model.py:20:forward")
    assert blocks[1].stack == NO_STACK
    assert blocks[-1].stack == NO_PYTHON_STACK
    assert [block.requested_bytes for block in blocks[:2]] == [4 * _MIB - 100, 2 * _MIB]


def test_growth_by_pool_and_stack_largest_first() -> None:
    before = parse_allocator(_sample())
    grown = _sample()
    attention = [_frame(7, "attention"), _frame(20, "forward")]
    grown.append(_segment(256 * _MIB, [_block(256 * _MIB, 8 * _MIB, frames=attention)]))
    grown.append(_segment(512 * _MIB, [_block(512 * _MIB, 8 * _MIB, frames=attention)], segment_pool_id=(0, 3)))
    grown.append(_segment(768 * _MIB, [_block(768 * _MIB, 9 * _MIB, frames=[_frame(3, "cache")])]))
    del grown[2]["blocks"][0]
    after = parse_allocator(grown)
    rows = stack_growth(before, after)
    assert [(row.pool, row.stack[0], row.grown_bytes) for row in rows] == [
        ((0, 0), "model.py:3:cache", 9 * _MIB),
        ((0, 0), "model.py:7:attention", 8 * _MIB),
        ((0, 3), "model.py:7:attention", 8 * _MIB),
        ((0, 3), NO_STACK[0], -_MIB),
    ]
    assert [(row.before_blocks, row.after_blocks) for row in rows] == [(0, 1), (1, 2), (0, 1), (1, 0)]
    mirrored = {(row.pool, row.stack): -row.grown_bytes for row in stack_growth(after, before)}
    assert mirrored == {(row.pool, row.stack): row.grown_bytes for row in rows}
    assert stack_growth(before, before) == ()


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from(sorted(allocator._STATES))), max_size=20))
def test_every_byte_is_active_or_free(pieces: list[tuple[int, str]]) -> None:
    blocks, at = [], 0
    for size, state in pieces:
        blocks.append(_block(at, size * 512, state))
        at += size * 512
    (figures,) = pool_figures(parse_allocator([_segment(0, blocks)]))
    assert figures.active_bytes + figures.free_bytes == figures.reserved_bytes == at
    assert 0 <= figures.unused_share <= 1
    assert 0 <= figures.scattered_share <= 1
    assert figures.largest_free_bytes <= figures.free_bytes


def _without(name: str) -> list[dict[str, Any]]:
    broken = _sample()
    del broken[0][name]
    return broken


def _with(changes: dict[str, Any], *, block: bool = False) -> list[dict[str, Any]]:
    broken = _sample()
    (broken[0]["blocks"][1] if block else broken[0]).update(changes)
    return broken


@pytest.mark.parametrize(
    "broken",
    [
        None,
        "segments",
        {"segments": None},
        [1],
        _without("blocks"),
        _without("total_size"),
        _with({"address": -1}),
        _with({"address": True}),
        _with({"segment_pool_id": (1, 2, 3)}),
        _with({"segment_pool_id": ("a", "b")}),
        _with({"state": "melted"}, block=True),
        _with({"size": "1"}, block=True),
        _with({"size": 2**40}, block=True),
        _with({"address": 0}, block=True),
        _with({"frames": {"a": 1}}, block=True),
        _with({"frames": [1]}, block=True),
        _with({"frames": [{"filename": "a.py"}]}, block=True),
    ],
    ids=range(17),
)
def test_what_is_no_snapshot_is_refused(broken: Any) -> None:
    with pytest.raises(AllocatorSnapshotError):
        parse_allocator(broken)


def test_shared_references_do_not_multiply_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "BLOCKS_MAX", 1000)
    blocks = [_block(at * 512, 512) for at in range(100)]
    segment = _segment(0, blocks)
    with pytest.raises(AllocatorSnapshotError, match="more than 1000"):
        parse_allocator([segment] * 100)
    monkeypatch.setattr(allocator, "FRAMES_READ_MAX", 50)
    frames = [_frame(1, "f", "??")] * 30
    with pytest.raises(AllocatorSnapshotError, match="more than 50 frames"):
        parse_allocator([_segment(0, [_block(0, 512, frames=frames), _block(512, 512, frames=frames)])])


@pytest.mark.skipif(not _REAL.exists(), reason=f"PATCHCTL_TEST_DATA has no {_REAL.name}")
def test_a_real_snapshot() -> None:
    found = load_allocator(_REAL)
    assert len(found.segments) == 98
    blocks = [block for segment in found.segments for block in segment.blocks]
    assert len(blocks) == 230
    assert sum(block.state == "allocated" for block in blocks) == 223
    (figures,) = pool_figures(found)
    assert figures.active_bytes + figures.free_bytes == figures.reserved_bytes
    assert sum(segment.size_bytes for segment in found.segments) == figures.reserved_bytes
    assert 0 < figures.unused_share < 0.5
    fewer = copy.copy(found.segments[:-1])
    rows = stack_growth(allocator.AllocatorSnapshot(fewer), found)
    gone = [block for block in found.segments[-1].blocks if block.state != "free"]
    assert sum(row.grown_bytes for row in rows) == sum(block.size_bytes for block in gone)


def _fake_nvml(monkeypatch: pytest.MonkeyPatch, processes: list[list[tuple[int, int | None]]]) -> list[str]:
    calls: list[str] = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: len(processes),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes[handle]
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return calls


def test_driver_memory_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _fake_nvml(monkeypatch, [[(1, 5), (7, 100)], [(1, 9)], [(7, 30), (7, 1)]])
    found = read_driver_memory(7)
    assert [(use.index, use.uuid, use.used_bytes) for use in found.devices] == [(0, "GPU-0", 100), (2, "GPU-2", 31)]
    assert found.used_bytes == 131
    assert calls == ["init", "shutdown"]


def test_driver_that_does_not_tell_gives_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_nvml(monkeypatch, [[(7, None)], [(7, 30)]])
    assert read_driver_memory(7).used_bytes is None
    assert read_driver_memory(8).devices == ()


def test_driver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "not installed" in read_driver_memory(1).reason
    calls = _fake_nvml(monkeypatch, [])

    def fail() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", fail)
    found = read_driver_memory(1)
    assert "Driver Not Loaded" in found.reason
    assert found.used_bytes is None
    assert calls == []


def test_no_cuda_no_allocator() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    from snapshots.device.torch_memory import read_allocator

    assert read_allocator() is None


def test_allocator_is_asked_without_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from snapshots.device.torch_memory import read_allocator

    asked: list[dict[str, Any]] = []

    def memory_snapshot(mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        asked.append({"mempool_id": mempool_id, "include_traces": include_traces})
        return _sample()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", memory_snapshot)
    found = read_allocator()
    assert found == parse_allocator(_sample())
    assert asked == [{"mempool_id": None, "include_traces": False}]
