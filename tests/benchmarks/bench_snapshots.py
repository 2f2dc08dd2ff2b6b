"""Snapshot figures against the memory speed of the same machine in the same run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from tests.benchmarks.context import Bench
from tests.benchmarks.figures import Figure, Report
from tests.benchmarks.snapshot_overhead import measure_overhead
from tests.benchmarks.snapshot_pages import PagesOptions, measure_pages
from tests.benchmarks.snapshot_state import measure_state
from tests.benchmarks.snapshot_store import measure_store

_SIZES_GIB = (1.0, 4.0)
_DIRTY = (0.001, 0.01, 0.03)
_PAGE_ROUNDS = 100
_STATE_MIB = 1024
_STATE_ROUNDS = 9
_OVERHEAD_ROUNDS = 40
_STORE_MIB, _STORE_ROUNDS = 512, 5
# The target process, the limits' buffers and this process; the rest is other people's.
_SPARE_BYTES = 3 << 30
# The bounds for 4 GiB with 1 % written.
_P99_MS_MAX = 87
_P99_MS_AIM = 30
_MEMCPY_SHARE_AIM = 0.4


def run(bench: Bench) -> Report:
    """Diff 1 and 4 GiB with 0.1, 1 and 3 % of the pages written; hash 1 GiB of tensors; the cost of being armed."""
    figures: list[Figure] = []
    data: dict[str, object] = {}
    for gib in _SIZES_GIB:
        bench.tell(f"snapshots: tracked pages of {gib:g} GiB")
        if _available_bytes() < gib * 2**30 + _SPARE_BYTES:
            data[f"pages_{gib:g}_gib"] = "not enough free memory"
            continue
        pages = measure_pages(PagesOptions(gib=gib, dirty=_DIRTY, rounds=_PAGE_ROUNDS))
        data[f"pages_{gib:g}_gib"] = pages or "no write tracking here"
        if pages is not None:
            figures += _page_figures(gib, pages)
    bench.tell("snapshots: tensors")
    state = measure_state(_STATE_MIB, _STATE_ROUNDS)
    data["state"] = state
    for threads in (1, 2):
        speed, limit = state[f"hash_{threads}_gb_s"], state[f"read_{threads}_gb_s"]
        name = f"hash of 1 GiB of tensors, {threads} thread{'s' * (threads > 1)}"
        figures.append(Figure(name, speed, "GB/s", "reading alone", limit, at_least=0.9))
    figures.append(Figure("CPU of hashing", state["hash_cpu_ms"], "ms", "of reading alone", state["read_cpu_ms"]))
    bench.tell("snapshots: cost of being armed")
    overhead = measure_overhead(_OVERHEAD_ROUNDS)
    data["overhead"] = overhead or "no write tracking here"
    if overhead is not None:
        armed, plain = overhead["armed_ms"], overhead["plain_ms"]
        figures.append(Figure("CPU of serving, armed", armed, "ms", "not armed", plain, at_most=1.05))
    bench.tell("snapshots: the store")
    data["store"] = store = measure_store(_STORE_MIB, _STORE_ROUNDS)
    figures += [
        Figure("first snapshot stored", store["first_ms"], "ms", "reading alone", store["read_ms"]),
        Figure("second, identical", store["second_ms"], "ms", "reading alone", store["read_ms"]),
        Figure("new bytes of it", store["second_new_bytes"], "B", "content", store["content_bytes"], at_most=0.0),
    ]
    return Report(figures, data)


def _page_figures(gib: float, pages: Mapping[str, Mapping[str, float]]) -> Iterator[Figure]:
    for share, found in pages.items():
        if share == "process":
            continue
        name = f"diff of {gib:g} GiB, {share} written"
        bounded = (gib, share) == (4.0, "1 %")
        mb = found["written_mb"]
        for against in ("memcpy", "memcmp", "read"):
            yield Figure(
                name,
                mb / found["diff_p50_ms"],
                "GB/s",
                against,
                mb / found[f"{against}_p50_ms"],
                at_least=_MEMCPY_SHARE_AIM if bounded and against == "memcpy" else None,
            )
        yield Figure(f"{name}, p99", found["diff_p99_ms"], "ms", "its p50", found["diff_p50_ms"])
        if bounded:
            yield Figure(f"{name}, p99", found["diff_p99_ms"], "ms", "bound", _P99_MS_MAX, at_most=1)
            yield Figure(f"{name}, p99", found["diff_p99_ms"], "ms", "aim", _P99_MS_AIM, at_most=1)
            yield Figure(f"whole capture: {name}, p99", found["whole_p99_ms"], "ms", "bound", _P99_MS_MAX, at_most=1)
    process = pages["process"]
    yield Figure(
        f"capture of {gib:g} GiB, nothing written", process["clean_p50_ms"], "ms", "in full", process["full_ms"]
    )


def _available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
