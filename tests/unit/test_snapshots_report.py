"""Differences for people: the worst finding and the largest growth first, both directions, nothing presumed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from snapshots.model import Confidence, GenerationState, HostSnapshot, PageSet, ProcessSnapshot, Region, TensorState
from snapshots.report import description, difference, process_snapshot, summary
from snapshots.store.manifest import Blob, Manifest


def _region(start: int, pages: int, *digests: int, name: str = "", confidence: Confidence = "exact") -> Region:
    page_set = PageSet(
        np.array([(start >> 12) + i for i in range(len(digests))], "<u8").tobytes(), np.array(digests, "<u8").tobytes()
    )
    return Region(
        start,
        start + pages * 4096,
        "rw-p",
        "anon",
        name,
        pages * 4096,
        pages * 4096,
        "page_hash",
        confidence,
        page_set,
    )


def _host(*regions: Region, tensor: TensorState | None = None, pid: int = 7) -> HostSnapshot:
    size = sum(region.size_bytes for region in regions)
    process = ProcessSnapshot("engine", pid, 1, size, size, size, regions)
    tensors = {} if tensor is None else {"w": tensor}
    return HostSnapshot(0, 1, (GenerationState(1, "sha256:x", tensors),), {"engine": process})


_W = TensorState("a" * 32, "float32", (4,), chunks=bytes(48))


def test_growth_comes_first_and_both_directions_are_seen() -> None:
    before = _host(_region(0x10000, 4, 1, 2, name="[heap]"), _region(0x90000, 2, name="old"), tensor=_W)
    after = _host(
        _region(0x10000, 4, 1, 3, name="[heap]"), _region(0x50000, 8, name="leak"), _region(0x70000, 1), tensor=_W
    )
    rows = difference(before, after, roles=["engine"])["regions"]
    assert [(row["region"], row["growth_bytes"], row["changed_bytes"]) for row in rows] == [
        ("leak", 8 * 4096, 0),
        ("[anon]", 4096, 0),
        ("[heap]", 0, 4096),
        ("old", -2 * 4096, 0),
    ]
    back = difference(after, before, roles=["engine"])["regions"]
    assert {row["region"]: -row["growth_bytes"] for row in back} == {r["region"]: r["growth_bytes"] for r in rows}


def test_a_changed_tensor_is_corruption_and_says_where() -> None:
    changed = replace(_W, digest="b" * 32, chunks=bytes(16) + b"\x01" * 16 + bytes(16))
    report = difference(
        _host(_region(0x1000, 1), tensor=_W), _host(_region(0x1000, 1), tensor=changed), roles=["engine"]
    )
    assert report["effect"] == "corruption"
    assert report["findings"][0]["subject"] == "tensor w of generation 1"
    assert "in 1 of 3 MiB, first in MiB 1" in report["findings"][0]["what"]


def test_what_was_not_seen_is_unknown() -> None:
    region = _region(0x1000, 1)
    seen = _host(region, tensor=_W)
    for other in (
        _host(replace(region, confidence="blind"), tensor=_W),
        _host(region, tensor=_W, pid=8),
        replace(seen, processes={}),
    ):
        assert difference(seen, other, roles=["engine"])["effect"] == "unknown"
    without_tensors = _host(region)
    assert difference(without_tensors, without_tensors, roles=["engine"])["effect"] == "unknown"
    assert difference(seen, seen, roles=["engine"])["effect"] == "unchanged"


def test_a_process_that_is_no_engine_needs_no_tensors() -> None:
    process = replace(_host(_region(0x1000, 1, 5)).processes["engine"], role="process")
    taken = process_snapshot(process, taken_unix_ns=1)
    assert difference(taken, taken, roles=["process"])["effect"] == "unchanged"


def test_descriptions_say_what_can_be_restored() -> None:
    manifest = Manifest("id", "manual", "t1", _host(_region(0x1000, 1), _region(0x9000, 3), tensor=_W), Blob(0, ()), ())
    assert summary(manifest)["pids"] == {"engine": 7}
    shown = description(manifest)
    assert [region["anonymous_bytes"] for region in shown["processes"]["engine"]["regions"]] == [12288, 4096]
    assert shown["generations"][0]["tensors"]["w"]["restorable"] is False
