"""Samples the memory of front and engine beside their progress, all the time, into a short ring."""

from __future__ import annotations

import threading
import time
from collections import deque

from patchctl.agent.host import EngineHost
from patchctl.errors import PatchctlError
from snapshots.capture.errors import CaptureError
from snapshots.capture.process import sample_memory
from snapshots.growth import MemorySample

# Five minutes at ten samples a second: longer than the longest bake with its window before.
_SAMPLES_MAX = 3000

ROLES = ("front", "engine")


class MemoryWatch:
    """A thread that keeps the last minutes of memory samples of both processes.

    A gap (a process being replaced) empties the rings: samples of two processes never mix.
    """

    def __init__(self, host: EngineHost, period_s: float) -> None:
        self._host = host
        self._period_s = period_s
        self._rings: dict[str, deque[MemorySample]] = {role: deque(maxlen=_SAMPLES_MAX) for role in ROLES}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._paused = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def pause(self) -> None:
        """Forget everything and wait: the processes are about to be replaced."""
        self._paused.set()
        self._forget()

    def resume(self) -> None:
        """Sample the new processes."""
        self._paused.clear()

    def between(self, start_s: float, end_s: float) -> dict[str, tuple[MemorySample, ...]]:
        """Samples of each role with ``start_s <= t_s <= end_s`` (monotonic clock)."""
        with self._lock:
            return {
                role: tuple(sample for sample in ring if start_s <= sample.t_s <= end_s)
                for role, ring in self._rings.items()
            }

    def memory_bytes(self) -> dict[str, int]:
        """Newest anonymous memory of each role; a role without a sample is left out."""
        with self._lock:
            return {role: ring[-1].anonymous_bytes for role, ring in self._rings.items() if ring}

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            if self._paused.is_set():
                continue
            try:
                self._sample()
            except (PatchctlError, CaptureError):
                self._forget()

    def _sample(self) -> None:
        stats = self._host.front_stats()
        for role, pid in self._host.processes.pids.items():
            sample = sample_memory(pid, requests_completed=stats["requests_completed"], tokens=stats["tokens_out"])
            with self._lock:
                self._rings[role].append(sample)

    def _forget(self) -> None:
        with self._lock:
            for ring in self._rings.values():
                ring.clear()


def monotonic_s() -> float:
    """The clock of the samples."""
    return time.monotonic()
