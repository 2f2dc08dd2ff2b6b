"""Snapshot figures against the memory speed of the same machine in the same run."""

from __future__ import annotations

from tests.benchmarks.context import Bench
from tests.benchmarks.figures import Figure, Report
from tests.benchmarks.snapshot_pages import PagesOptions, measure_pages
from tests.benchmarks.snapshot_state import measure_state

_PAGE_ROUNDS = 100
_STATE_ROUNDS = 9


def run(bench: Bench) -> Report:
    """Diff 1 GiB with 1 % of its pages written; hash 512 MiB of tensors."""
    bench.tell("snapshots: tracked pages")
    pages = measure_pages(PagesOptions(gib=1.0, dirty=0.01, rounds=_PAGE_ROUNDS))
    bench.tell("snapshots: tensors")
    state = measure_state(512, _STATE_ROUNDS)
    figures = [
        Figure("hash of tensors, 1 thread", state["hash_1_gb_s"], "GB/s", "read alone", state["read_gb_s"]),
        Figure("hash of tensors, 2 threads", state["hash_2_gb_s"], "GB/s", "read alone", state["read_gb_s"]),
        Figure("CPU of reading alone", state["read_cpu_ms"], "ms", "of hashing", state["hash_cpu_ms"]),
    ]
    if pages is None:
        return Report(figures, {"state": state, "pages": "no write tracking here"})
    figures += [
        Figure("diff of 1 GiB, 1 % written, p50", pages["diff_p50_ms"], "ms", "memcpy of it", pages["copy_p50_ms"]),
        Figure("diff of 1 GiB, 1 % written, p99", pages["diff_p99_ms"], "ms", "its p50", pages["diff_p50_ms"]),
        Figure("scan for written pages, p50", pages["scan_p50_ms"], "ms", "diff p50", pages["diff_p50_ms"]),
        Figure("capture, nothing written", pages["clean_p50_ms"], "ms", "full capture", pages["full_ms"]),
    ]
    return Report(figures, {"state": state, "pages": pages})
