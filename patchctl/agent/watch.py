"""Samples the memory of front and engine beside their progress, all the time, into a short ring."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from patchctl.agent.host import EngineHost
from patchctl.agent.processes import ROLES
from patchctl.errors import PatchctlError
from snapshots.capture.errors import CaptureError
from snapshots.capture.process import sample_memory
from snapshots.growth import MemorySample

# Five minutes at ten samples a second: longer than the longest bake with its window before.
_SAMPLES_MAX = 3000


class MemoryWatch:
    """A thread that keeps the last minutes of memory samples of both processes.

    Samples of two processes never mix: a ring is emptied when its process was replaced. The front counts
    the requests that every sample is related to, so a new front empties both rings.
    """

    def __init__(self, host: EngineHost, period_s: float) -> None:
        self._host = host
        self._period_s = period_s
        self._rings: dict[str, deque[MemorySample]] = {role: deque(maxlen=_SAMPLES_MAX) for role in ROLES}
        self._pids: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

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
            self.look()

    def look(self) -> None:
        """Take one sample of each process; the watch's own thread does."""
        pids = dict(self._host.processes.pids)
        try:
            stats = self._host.front_stats()
        except PatchctlError:
            return  # it is being replaced; the new one has another pid
        self._forget_replaced(pids)
        for role, pid in pids.items():
            with suppress(CaptureError):
                self._sample(role, pid, stats)

    def _sample(self, role: str, pid: int, stats: dict[str, Any]) -> None:
        sample = sample_memory(pid, requests_completed=stats["requests_completed"], tokens=stats["tokens_out"])
        with self._lock:
            self._rings[role].append(sample)

    def _forget_replaced(self, pids: dict[str, int]) -> None:
        replaced = {role for role, pid in pids.items() if self._pids.get(role) != pid}
        if "front" in replaced:
            replaced = set(ROLES)
        with self._lock:
            for role in replaced:
                self._rings[role].clear()
        self._pids = {**self._pids, **pids}


def monotonic_s() -> float:
    """The clock of the samples."""
    return time.monotonic()
