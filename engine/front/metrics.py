"""What the front counts, all of fixed size.

The memory verdict watches this process: nothing here may grow with the number of requests.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from engine.front.histogram import Histogram, RecentHistogram
from engine.wire import Load

# Upper bounds as in vLLM's metrics, cut to what one host can show.
_TTFT_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_LATENCY_BOUNDS_S: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS_BOUNDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)

Finish: TypeAlias = Literal["stop", "length"]
# Ends that are not the client's doing.
Failure: TypeAlias = Literal[
    "engine_error", "engine_cancelled", "engine_link_lost", "front_stopping", "request_path_failed"
]
# Ends that are.
Departure: TypeAlias = Literal["client_left", "client_too_slow"]
Outcome: TypeAlias = Finish | Failure | Departure
# Answers with an error before anything reached the engine.
Refusal: TypeAlias = Literal["invalid", "queue_full", "unavailable", "request_path_failed"]


class EngineCounters:
    """The engine's own numbers, from its ``Load`` messages; counters go on across engines that crash."""

    __slots__ = ("_ended", "latest")

    def __init__(self) -> None:
        self.latest: Load | None = None
        self._ended = {"prefix_query_tokens": 0, "prefix_hit_tokens": 0, "preemptions": 0, "steps": 0}

    def engine_lost(self) -> None:
        """The engine that reported is gone; the next one counts from 0."""
        if self.latest is not None:
            for name in self._ended:
                self._ended[name] += getattr(self.latest, name)
        self.latest = None

    def total(self, name: str) -> int:
        """A counter of ``Load``, over all engines so far."""
        now: int = 0 if self.latest is None else getattr(self.latest, name)
        return self._ended[name] + now

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.latest.kv_blocks_used / self.latest.kv_blocks if self.latest and self.latest.kv_blocks else 0.0


class Metrics:
    """Everything the front counts.

    Attributes:
        ttft: arrival of the request to the first token of a choice, seconds.
        inter_token: between two tokens of a choice, seconds.
        latency: arrival to the end of a completed response, seconds.
        queue_time: submission of a choice until the engine began it, seconds.
        engine_starts: engines attached so far.
        swaps: exchanges the engine reported.
    """

    def __init__(self) -> None:
        self.ttft = RecentHistogram(_TTFT_BOUNDS_S)
        self.inter_token = RecentHistogram(_INTER_TOKEN_BOUNDS_S)
        self.latency = Histogram(_LATENCY_BOUNDS_S)
        self.queue_time = Histogram(_LATENCY_BOUNDS_S)
        self.request_prompt_tokens = Histogram(_TOKENS_BOUNDS)
        self.request_generation_tokens = Histogram(_TOKENS_BOUNDS)
        self.finishes: dict[str, int] = dict.fromkeys(get_args(Finish), 0)
        self.failures: dict[str, int] = dict.fromkeys(get_args(Failure), 0)
        self.departures: dict[str, int] = dict.fromkeys(get_args(Departure), 0)
        self.refusals: dict[str, int] = dict.fromkeys(get_args(Refusal), 0)
        self.prompt_tokens = 0
        self.tokens_out = 0
        self.engine_starts = 0
        self.swaps = 0
        self.engine = EngineCounters()

    @property
    def engine_restarts(self) -> int:
        """Engines after the first."""
        return max(self.engine_starts - 1, 0)

    def count(self, outcome: Outcome) -> None:
        """A response that reached the engine has ended; exactly one outcome each."""
        (table,) = (table for table in (self.finishes, self.failures, self.departures) if outcome in table)
        table[outcome] += 1

    def stats(self) -> dict[str, int | float]:
        """Counters and window percentiles, flat. What a client did to itself is not counted as failed."""
        ttft_p50, ttft_p99 = self.ttft.percentiles_ms(0.5, 0.99)
        inter_p50, inter_p99 = self.inter_token.percentiles_ms(0.5, 0.99)
        return {
            "requests_completed": sum(self.finishes.values()),
            "requests_failed": sum(self.failures.values()),
            "requests_cancelled": sum(self.departures.values()),
            "requests_rejected": sum(self.refusals.values()),
            "tokens_out": self.tokens_out,
            "engine_restarts": self.engine_restarts,
            "ttft_ms_p50": ttft_p50,
            "ttft_ms_p99": ttft_p99,
            "inter_token_ms_p50": inter_p50,
            "inter_token_ms_p99": inter_p99,
        }
