"""Counters, histograms and recent windows of the front, all of fixed size.

The memory verdict watches this process: nothing here may grow with the number of requests.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final, Literal, TypeAlias

# Upper bounds in seconds, as vLLM's metrics have them, cut to what one host can show.
_TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
# Samples of the recent windows: p99 needs a few hundred; 2048 doubles are 16 KiB.
_WINDOW_SAMPLES: Final = 2048


Outcome: TypeAlias = Literal["stop", "length", "failed", "cancelled"]


class Histogram:
    """A Prometheus histogram in seconds with fixed buckets, and a window of the latest samples."""

    __slots__ = ("_bounds_s", "_counts", "_recent", "_sum_s", "count")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._recent = array("d", bytes(8 * _WINDOW_SAMPLES))
        self._sum_s = 0.0
        self.count = 0

    def observe(self, seconds: float) -> None:
        """Add one sample."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._recent[self.count % _WINDOW_SAMPLES] = seconds
        self._sum_s += seconds
        self.count += 1

    def percentiles_ms(self, *fractions: float) -> list[float]:
        """Percentiles of the recent window, nearest rank, in milliseconds; zeros before any sample."""
        recent = sorted(self._recent[: min(self.count, _WINDOW_SAMPLES)])
        if not recent:
            return [0.0] * len(fractions)
        return [round(recent[min(int(fraction * len(recent)), len(recent) - 1)] * 1e3, 3) for fraction in fractions]

    def lines(self, name: str) -> Iterator[str]:
        """Prometheus text lines."""
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*self._bounds_s, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum_s}"
        yield f"{name}_count {self.count}"


class Metrics:
    """Everything the front counts."""

    def __init__(self) -> None:
        self.ttft = Histogram(_TTFT_BUCKETS_S)
        self.inter_token = Histogram(_INTER_TOKEN_BUCKETS_S)
        self.outcomes: dict[Outcome, int] = {"stop": 0, "length": 0, "failed": 0, "cancelled": 0}
        self.rejected = 0
        self.prompt_tokens = 0
        self.tokens_out = 0

    def count(self, outcome: Outcome) -> None:
        """A response that reached the engine has ended; exactly one outcome each."""
        self.outcomes[outcome] += 1

    def stats(self) -> dict[str, int | float]:
        """Counters and window percentiles, flat."""
        ttft_p50, ttft_p99 = self.ttft.percentiles_ms(0.5, 0.99)
        inter_p50, inter_p99 = self.inter_token.percentiles_ms(0.5, 0.99)
        return {
            "requests_completed": self.outcomes["stop"] + self.outcomes["length"],
            "requests_failed": self.outcomes["failed"],
            "requests_cancelled": self.outcomes["cancelled"],
            "requests_rejected": self.rejected,
            "tokens_out": self.tokens_out,
            "ttft_ms_p50": ttft_p50,
            "ttft_ms_p99": ttft_p99,
            "inter_token_ms_p50": inter_p50,
            "inter_token_ms_p99": inter_p99,
        }

    def prometheus(self, *, running: int, waiting: int, generations: Iterable[tuple[int, str, bool]]) -> str:
        """The page of /metrics (text format 0.0.4). ``generations``: number, build digest, active."""
        lines = [
            *_family("patchctl_num_requests_running", "gauge", {"": running}),
            *_family("patchctl_num_requests_waiting", "gauge", {"": waiting}),
            *_family("patchctl_prompt_tokens_total", "counter", {"": self.prompt_tokens}),
            *_family("patchctl_generation_tokens_total", "counter", {"": self.tokens_out}),
            *_family(
                "patchctl_request_success_total",
                "counter",
                {
                    '{finished_reason="stop"}': self.outcomes["stop"],
                    '{finished_reason="length"}': self.outcomes["length"],
                },
            ),
            *_family(
                "patchctl_request_failure_total",
                "counter",
                {
                    '{reason="failed"}': self.outcomes["failed"],
                    '{reason="cancelled"}': self.outcomes["cancelled"],
                    '{reason="rejected"}': self.rejected,
                },
            ),
            *self.ttft.lines("patchctl_time_to_first_token_seconds"),
            *self.inter_token.lines("patchctl_inter_token_latency_seconds"),
            *_family(
                "patchctl_generation_info",
                "gauge",
                {
                    f'{{generation="{number}",build="{build}",active="{str(active).lower()}"}}': 1
                    for number, build, active in generations
                },
            ),
        ]
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, samples: dict[str, int]) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    for labels, value in samples.items():
        yield f"{name}{labels} {value}"
