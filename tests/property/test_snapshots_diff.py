"""The diff mirrors itself; the file format keeps every snapshot and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.codec import SnapshotInvalidError, decode_snapshot, encode_snapshot
from snapshots.diff import HostDiff, diff, diff_process
from snapshots.model import (
    PAGE_BYTES,
    Confidence,
    Gap,
    GenerationState,
    HostSnapshot,
    Method,
    PageSet,
    ProcessSnapshot,
    Region,
    RegionKind,
    TensorState,
    TrackerScan,
)
from snapshots.region_diff import RegionEvent

_MIRROR: dict[RegionEvent, RegionEvent] = {
    "new": "gone",
    "gone": "new",
    "grown": "shrunk",
    "shrunk": "grown",
    "changed": "changed",
    "unseen": "unseen",
}
_KINDS: Sequence[RegionKind] = ("anon", "anon", "anon", "file")
_METHODS: Sequence[Method] = ("page_hash", "page_hash", "write_tracking", "none")
_CONFIDENCES: Sequence[Confidence] = ("exact", "exact", "exact", "conservative", "blind")
_PERMS = ("rw-p", "r--p", "r-xp", "---p")


@st.composite
def regions(draw: st.DrawFn) -> tuple[Region, ...]:
    bounds = sorted(draw(st.sets(st.integers(1, 12), max_size=6)))
    found = []
    for low, high in zip(bounds[::2], bounds[1::2], strict=False):
        numbers = sorted(draw(st.sets(st.integers(low, high - 1))))
        digests = draw(st.lists(st.integers(1, 3), min_size=len(numbers), max_size=len(numbers)))
        found.append(
            Region(
                start=low * PAGE_BYTES,
                end=high * PAGE_BYTES,
                perms=draw(st.sampled_from(_PERMS)),
                kind=draw(st.sampled_from(_KINDS)),
                name="",
                rss_bytes=(high - low) * PAGE_BYTES,
                anonymous_bytes=draw(st.integers(0, high - low)) * PAGE_BYTES,
                method=draw(st.sampled_from(_METHODS)),
                confidence=draw(st.sampled_from(_CONFIDENCES)),
                pages=PageSet(np.array(numbers, "<u8").tobytes(), np.array(digests, "<u8").tobytes()),
                reason=draw(st.sampled_from(["", "why"])),
            )
        )
    return tuple(found)


@st.composite
def processes(draw: st.DrawFn, role: str) -> ProcessSnapshot:
    scan = draw(st.none() | st.builds(TrackerScan, st.just("s"), st.integers(1, 3)))
    gaps = draw(st.lists(st.builds(Gap, st.sampled_from("ab"), st.just("why"), st.booleans()), max_size=2))
    return ProcessSnapshot(
        role=role,
        pid=draw(st.sampled_from([7] * 9 + [8])),
        start_ticks=1,
        rss_bytes=draw(st.integers(0, 99)),
        anonymous_bytes=draw(st.integers(0, 99)),
        pss_bytes=0,
        regions=draw(regions()),
        gaps=tuple(gaps),
        scan=scan,
    )


_STATE = st.builds(
    TensorState, st.sampled_from(["aa", "bb"]), st.sampled_from(["float32", "bfloat16"]), st.just((2, 2)), st.just("")
)


@st.composite
def hosts(draw: st.DrawFn) -> HostSnapshot:
    numbers = sorted(draw(st.sets(st.integers(1, 3), min_size=1, max_size=2)))
    roles = sorted(draw(st.sets(st.sampled_from(["front", "engine"]))))
    return HostSnapshot(
        taken_unix_ns=draw(st.integers(0, 2**62)),
        generation=draw(st.sampled_from(numbers)),
        generations=tuple(
            GenerationState(n, f"sha256:{n}", draw(st.dictionaries(st.sampled_from("pqr"), _STATE))) for n in numbers
        ),
        processes={role: draw(processes(role)) for role in roles},
        counters=draw(st.dictionaries(st.sampled_from(["tokens"]), st.integers(0, 9))),
    )


def _events(found: HostDiff, *, mirrored: bool = False) -> list[tuple[object, ...]]:
    """Region events without what legitimately differs by direction (extent, perms and reason of the later side)."""
    return sorted(
        (p.role, _MIRROR[c.event] if mirrored else c.event, c.start, c.end, c.kind, c.bytes, c.writable, c.confidence)
        for p in found.processes
        for c in p.regions
    )


@given(hosts(), hosts())
def test_diff_mirrors_itself(a: HostSnapshot, b: HostSnapshot) -> None:
    there, back = diff(a, b), diff(b, a)
    assert _events(there) == _events(back, mirrored=True)
    assert (there.generations_new, there.roles_new) == (back.generations_gone, back.roles_gone)
    for one, other in zip((there.exchange, *there.resident), (back.exchange, *back.resident), strict=True):
        assert [(c.name, c.before, c.after) for c in one.changes] == [
            (c.name, c.after, c.before) for c in other.changes
        ]
    assert [p.gaps for p in there.processes] == [p.gaps for p in back.processes]


@given(hosts())
def test_a_host_does_not_differ_from_itself(a: HostSnapshot) -> None:
    found = diff(a, a)
    assert not found.exchange.changes
    assert not any(resident.changes for resident in found.resident)
    for process in found.processes:
        tracked = {r.start for r in a.processes[process.role].regions if r.method == "write_tracking"}
        # The same scan twice says nothing about writes: tracked memory then counts as changed, or not at all.
        assert all(c.event == "unseen" or (c.event == "changed" and c.start in tracked) for c in process.regions)


@given(regions(), regions())
def test_extents_add_up(old: tuple[Region, ...], new: tuple[Region, ...]) -> None:
    def host(found: tuple[Region, ...]) -> HostSnapshot:
        process = ProcessSnapshot("engine", 1, 1, 0, 0, 0, found)
        return HostSnapshot(0, 1, (GenerationState(1, "sha256:1", {}),), {"engine": process})

    (process,) = diff(host(old), host(new)).processes
    size = {event: sum(c.bytes for c in process.regions if c.event == event) for event in _MIRROR}
    mapped_before, mapped_after = (sum(r.size_bytes for r in found) for found in (old, new))
    assert mapped_after - mapped_before == size["new"] + size["grown"] - size["gone"] - size["shrunk"]
    assert size["changed"] + size["unseen"] <= min(mapped_before, mapped_after)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ({2: 7, 3: 7}, {2: 7, 3: 7}, 0),
        ({2: 7, 3: 7}, {2: 7, 3: 8}, 1),
        ({2: 7, 3: 7}, {2: 7}, 1),
        ({2: 7}, {2: 7, 3: 7, 4: 7}, 2),
        ({2: 7, 3: 7}, {4: 7, 5: 7}, 4),
        ({2: 7, 9: 7}, {2: 7}, 0),  # outside what both have mapped
    ],
)
def test_pages_that_differ(old: dict[int, int], new: dict[int, int], changed: int) -> None:
    def capture(pages: dict[int, int], end: int) -> ProcessSnapshot:
        packed = PageSet(np.array(list(pages), "<u8").tobytes(), np.array(list(pages.values()), "<u8").tobytes())
        region = Region(4096, end * 4096, "rw-p", "anon", "", 0, 0, "page_hash", "exact", packed)
        return ProcessSnapshot("engine", 1, 1, 0, 0, 0, (region,))

    before, after = capture(old, 10), capture(new, 8)
    for found in (diff_process(before, after), diff_process(after, before)):
        assert sum(c.bytes for c in found.regions if c.event == "changed") == changed * PAGE_BYTES


@given(hosts())
def test_the_file_format_keeps_everything(a: HostSnapshot) -> None:
    raw = encode_snapshot(a)
    assert decode_snapshot(raw) == a
    assert encode_snapshot(decode_snapshot(raw)) == raw


@pytest.mark.parametrize(
    "path",
    [(), ("snapshot",), ("snapshot", "processes", "engine"), ("snapshot", "processes", "engine", "regions", 0)],
)
def test_the_file_format_refuses_unknown_fields(path: tuple[str | int, ...]) -> None:
    region = Region(4096, 8192, "rw-p", "anon", "", 0, 0, "none", "exact")
    process = ProcessSnapshot("engine", 1, 1, 0, 0, 0, (region,))
    state = GenerationState(1, "sha256:1", {"w": TensorState("aa", "float32", (2,))})
    document = json.loads(encode_snapshot(HostSnapshot(0, 1, (state,), {"engine": process})))
    decode_snapshot(json.dumps(document).encode())
    target = document
    for step in path:
        target = target[step]
    target["surprise"] = 1
    with pytest.raises(SnapshotInvalidError):
        decode_snapshot(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"schema_version":1', b'"schema_version":2'),
        (b'"generation":1,"generations"', b'"generation":9,"generations"'),
        (b'"end":8192', b'"end":1'),
        (b'"numbers":""', b'"numbers":"AAAA"'),
        (b'"role":"engine"', b'"role":"front"'),
        (b'"pid":1', b'"pid":"1"'),
        (b"{", b"["),
    ],
)
def test_the_file_format_refuses_broken_documents(old: bytes, new: bytes) -> None:
    region = Region(4096, 8192, "rw-p", "anon", "", 0, 0, "none", "exact")
    process = ProcessSnapshot("engine", 1, 1, 0, 0, 0, (region,))
    raw = encode_snapshot(HostSnapshot(0, 1, (GenerationState(1, "sha256:1", {}),), {"engine": process}))
    assert old in raw
    with pytest.raises(SnapshotInvalidError):
        decode_snapshot(raw.replace(old, new, 1))
