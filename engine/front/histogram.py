"""Histograms and recent windows of fixed size."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

# p99 needs a few hundred samples; 2048 doubles are 16 KiB.
_WINDOW_SAMPLES: Final = 2048


class Histogram:
    """A Prometheus histogram with fixed upper bounds.

    Attributes:
        bounds: ascending; a sample equal to a bound is counted under it.
        total: sum of all samples.
        count: of all samples.
    """

    __slots__ = ("_counts", "bounds", "count", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.count = 0

    def observe(self, value: float) -> None:
        """Add one sample."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.count += 1

    def cumulative(self) -> list[int]:
        """Samples up to each bound, and in the end all of them."""
        total, out = 0, []
        for count in self._counts:
            total += count
            out.append(total)
        return out


class RecentHistogram(Histogram):
    """A histogram in seconds that also remembers its latest samples exactly."""

    __slots__ = ("_recent",)

    def __init__(self, bounds: tuple[float, ...]) -> None:
        super().__init__(bounds)
        self._recent = array("d", bytes(8 * _WINDOW_SAMPLES))

    def observe(self, value: float) -> None:
        """See :class:`Histogram`."""
        self._recent[self.count % _WINDOW_SAMPLES] = value
        super().observe(value)

    def percentiles_ms(self, *fractions: float) -> list[float]:
        """Percentiles of the latest samples, nearest rank, in milliseconds; zeros before any sample."""
        recent = sorted(self._recent[: min(self.count, _WINDOW_SAMPLES)])
        if not recent:
            return [0.0] * len(fractions)
        return [round(recent[min(int(fraction * len(recent)), len(recent) - 1)] * 1e3, 3) for fraction in fractions]
