"""Scan, re-arm, read and hash the written pages of another process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from patchctl.demo.measure import quantile
from snapshots.capture.pages import PageReader, WriteTracker
from snapshots.capture.probe import probe
from snapshots.capture.process import capture_process, sample_memory
from snapshots.model import PAGE_BYTES

# Holds `gib` of resident memory, then rewrites one byte of each page it is told to.
_TARGET = """
import mmap, random, sys
from snapshots.capture.uffd import arm_self
size, dirty = int(float(sys.argv[1]) * 2**30), float(sys.argv[2])
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, size, 4096): memory[at] = 1
import ctypes
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print(base, size, arm_self().arm_ms, flush=True)
rng = random.Random(1)
for line in sys.stdin:
    picked = rng.sample(range(size // 4096), int(size // 4096 * dirty))
    for page in picked: memory[page * 4096] = (memory[page * 4096] + 1) % 256
    print(len(picked), flush=True)
"""
# Room for one round's written pages (up to 25 % of 1 GiB) and far larger than the caches.
_COPY_BYTES = 256 << 20
_CAPTURES = 5
_SAMPLES = 9
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PagesOptions:
    """Size of the other process, the share of its pages written each round, rounds."""

    gib: float
    dirty: float
    rounds: int


class _Target:
    """A child that holds memory and writes to it on request."""

    def __init__(self, options: PagesOptions) -> None:
        command = [sys.executable, "-P", "-c", _TARGET, str(options.gib), str(options.dirty)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._child.pid
        base, size, arm_ms = self._line().split()
        self.start, self.end, self.arm_ms = int(base), int(base) + int(size), float(arm_ms)

    def write(self) -> int:
        """Write to some pages; returns how many."""
        assert self._child.stdin is not None
        self._child.stdin.write("dirty\n")
        self._child.stdin.flush()
        return int(self._line())

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()


def measure_pages(options: PagesOptions) -> dict[str, float] | None:
    """Milliseconds, medians unless named otherwise; None where the kernel has no write tracking."""
    if not probe().write_tracking.available:
        return None
    target = _Target(options)
    try:
        with WriteTracker(target.pid) as tracker:
            rounds = _rounds(target, tracker, options.rounds)
            clean = [_ms(lambda: capture_process(target.pid, "engine", tracker=tracker)) for _ in range(_CAPTURES)]
        full_ms = _ms(lambda: capture_process(target.pid, "engine"))
        samples = [_ms(lambda: sample_memory(target.pid, requests_completed=0, tokens=0)) for _ in range(_SAMPLES)]
    finally:
        target.close()
    return {
        "arm_ms": target.arm_ms,
        "scan_p50_ms": quantile(rounds["scan"], 0.5),
        "diff_p50_ms": quantile(rounds["diff"], 0.5),
        "diff_p99_ms": quantile(rounds["diff"], 0.99),
        "copy_p50_ms": quantile(rounds["copy"], 0.5),
        "clean_p50_ms": quantile(clean, 0.5),
        "full_ms": full_ms,
        "sample_p50_ms": quantile(samples, 0.5),
    }


def _rounds(target: _Target, tracker: WriteTracker, count: int) -> dict[str, list[float]]:
    """Diff what was written, then copy as many bytes: the arms take turns."""
    times: dict[str, list[float]] = {"scan": [], "diff": [], "copy": []}
    reader = PageReader(target.pid)
    source, goal = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    tracker.written(target.start, target.end)
    for turn in range(count):
        planted = target.write()
        began = time.perf_counter()
        numbers = tracker.written(target.start, target.end)
        scanned = time.perf_counter()
        assert numbers is not None
        pages, unread = reader.digest(numbers)
        times["diff"].append((time.perf_counter() - began) * 1e3)
        times["scan"].append((scanned - began) * 1e3)
        assert (len(pages), unread) == (planted, 0)
        times["copy"].append(_copy_ms(source, goal, planted * PAGE_BYTES, turn))
    return times


def _copy_ms(source: _Bytes, goal: _Bytes, size: int, turn: int) -> float:
    """Wall time to copy ``size`` bytes, another part at every turn, so that they come from memory."""
    at = turn * size % (len(source) - size)
    return _ms(lambda: np.copyto(goal[at : at + size], source[at : at + size]))


def _ms(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return (time.perf_counter() - began) * 1e3
