"""Scan, re-arm, read and hash the written pages of another process, beside the limits of the same round."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from patchctl.demo.measure import quantile
from snapshots.capture.pages import WriteTracker
from snapshots.capture.probe import probe
from snapshots.capture.process import capture_process, sample_memory
from snapshots.capture.reader import PageReader
from snapshots.model import PAGE_BYTES
from tests.benchmarks.snapshot_limits import MemoryLimits, elapsed_ms

# Holds `gib` of resident memory in small pages; each line is a share of them to rewrite by one byte.
_TARGET = """
import ctypes, mmap, random, sys
from snapshots.capture.uffd import arm_self
size = int(float(sys.argv[1]) * 2**30)
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, size, 4096): memory[at] = 1
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print(base, size, arm_self().arm_ms, flush=True)
rng = random.Random(1)
for line in sys.stdin:
    picked = rng.sample(range(size // 4096), int(size // 4096 * float(line)))
    for page in picked: memory[page * 4096] = (memory[page * 4096] + 1) % 256
    print(len(picked), flush=True)
"""
_CAPTURES = 5
_SAMPLES = 9
_LIMITS = ("memcpy", "memcmp", "read")


@dataclass(frozen=True, slots=True)
class PagesOptions:
    """Size of the other process, shares of its pages written, rounds of each share."""

    gib: float
    dirty: Sequence[float]
    rounds: int


@dataclass(slots=True)
class _Times:
    """Milliseconds, one a round; ``whole`` is a complete capture of the process."""

    written_bytes: int = 0
    diff: list[float] = field(default_factory=list)
    scan: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    limits: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _LIMITS})


class _Target:
    """A child that holds memory and writes to it on request."""

    def __init__(self, gib: float) -> None:
        command = [sys.executable, "-P", "-c", _TARGET, str(gib)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._child.pid
        base, size, arm_ms = self._line().split()
        self.start, self.end, self.arm_ms = int(base), int(base) + int(size), float(arm_ms)

    def write(self, share: float) -> int:
        """Write to a share of the pages; returns how many."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{share}\n")
        self._child.stdin.flush()
        return int(self._line())

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()


def measure_pages(options: PagesOptions) -> dict[str, dict[str, float]] | None:
    """Milliseconds by share of pages written, and of the process as a whole; None without write tracking."""
    if not probe().write_tracking.available:
        return None
    target = _Target(options.gib)
    try:
        with WriteTracker(target.pid) as tracker:
            times = _rounds(target, tracker, options)
            clean = [elapsed_ms(lambda: capture_process(target.pid, "e", tracker=tracker)) for _ in range(_CAPTURES)]
        full_ms = elapsed_ms(lambda: capture_process(target.pid, "e"))
        samples = [
            elapsed_ms(lambda: sample_memory(target.pid, requests_completed=0, tokens=0)) for _ in range(_SAMPLES)
        ]
    finally:
        target.close()
    process = {
        "arm_ms": target.arm_ms,
        "clean_p50_ms": quantile(clean, 0.5),
        "full_ms": full_ms,
        "sample_p50_ms": quantile(samples, 0.5),
    }
    return {"process": process} | {f"{100 * share:g} %": _summary(found) for share, found in times.items()}


def _summary(times: _Times) -> dict[str, float]:
    series = {"diff": times.diff, "scan": times.scan, "whole": times.whole, **times.limits}
    summary = {"written_mb": times.written_bytes / 1e6}
    for name, values in series.items():
        summary |= {f"{name}_p50_ms": quantile(values, 0.5), f"{name}_p99_ms": quantile(values, 0.99)}
    return summary


def _rounds(target: _Target, tracker: WriteTracker, options: PagesOptions) -> dict[float, _Times]:
    """Diff what was written, then touch as many bytes in the limits' ways: shares and arms take turns."""
    times = {share: _Times() for share in options.dirty}
    reader, limits = PageReader(target.pid), MemoryLimits()
    capture_process(target.pid, "e", tracker=tracker)
    for _ in range(options.rounds):
        for share, found in times.items():
            planted = target.write(share)
            began = time.perf_counter()
            numbers = tracker.written(target.start, target.end)
            scanned = time.perf_counter()
            assert numbers is not None
            pages = reader.digest(numbers)
            found.diff.append((time.perf_counter() - began) * 1e3)
            found.scan.append((scanned - began) * 1e3)
            assert int(pages.readable.sum()) == planted
            found.written_bytes = planted * PAGE_BYTES
            for name, spent_ms in limits.measure_ms(found.written_bytes).items():
                found.limits[name].append(spent_ms)
            target.write(share)
            found.whole.append(elapsed_ms(lambda: capture_process(target.pid, "e", tracker=tracker)))
    return times
