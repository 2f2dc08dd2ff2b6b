"""Counters and latency windows of the serve loop."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

# About two minutes of a 135M model on one core; percentiles of a longer past would hide a present change.
WINDOW_STEPS = 1024


class Window:
    """The last :data:`WINDOW_STEPS` durations, in milliseconds; one writer, any reader."""

    def __init__(self) -> None:
        self._values = [0.0] * WINDOW_STEPS
        self._count = 0
        self._lock = threading.Lock()

    def add(self, value_ms: float) -> None:
        """Record one duration."""
        with self._lock:
            self._values[self._count % WINDOW_STEPS] = value_ms
            self._count += 1

    def percentile(self, percent: float) -> float:
        """Nearest-rank percentile in milliseconds; 0 when nothing was recorded."""
        with self._lock:
            values = sorted(self._values[: self._count])
        if not values:
            return 0.0
        return values[min(len(values) - 1, int(len(values) * percent / 100))]


@dataclass(slots=True)
class Metrics:
    """Written by the serve loop alone; numbers may be read at any time."""

    requests_completed: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    tokens_generated: int = 0
    steps: int = 0
    nonfinite_rows: int = 0
    swaps: int = 0
    fallbacks: int = 0
    exchange_us_last: float = 0.0
    boundary_wait_ms_last: float = 0.0
    swap_gap_ms_last: float = 0.0
    step: Window = field(default_factory=Window)

    def as_dict(self) -> dict[str, int | float]:
        """Flat, for ``Stats``."""
        return {
            "requests_completed": self.requests_completed,
            "requests_failed": self.requests_failed,
            "requests_cancelled": self.requests_cancelled,
            "tokens_generated": self.tokens_generated,
            "steps": self.steps,
            "nonfinite_rows": self.nonfinite_rows,
            "swaps": self.swaps,
            "fallbacks": self.fallbacks,
            "exchange_us_last": self.exchange_us_last,
            "boundary_wait_ms_last": self.boundary_wait_ms_last,
            "swap_gap_ms_last": self.swap_gap_ms_last,
            "step_ms_p50": self.step.percentile(50),
            "step_ms_p99": self.step.percentile(99),
            "step_ms_max": self.step.percentile(100),
        }
