"""What the serve loop sends to the front, and what it counts on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine.metrics import Metrics
from engine.schedule import Schedule
from engine.table import KvSpace
from engine.wire import Load, ToFront, Token, Tokens

# The front's gauges: fresh enough for a scrape, too rare to cost anything.
_LOAD_PERIOD_S = 0.25
_MS = 1e3

Send = Callable[[ToFront], None]


def _nobody(_message: ToFront) -> None:
    """No front is attached: nobody waits for this."""


class Outbox:
    """In order, to the front attached last; without one everything is dropped."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._send: Send = _nobody
        self._tokens_sent_s: float | None = None
        self._gap_from_s: float | None = None
        self._load_sent_s = 0.0

    def attach(self, send: Send) -> None:
        """Send to a new front; ``send`` raises OSError when it is gone."""
        self._send = send

    def tell(self, message: ToFront) -> None:
        """Send one message."""
        try:
            self._send(message)
        except OSError:
            # The reader of this front sees the end of the stream as well, and drops its requests.
            self._send = _nobody

    def deliver(self, generation: int, tokens: Sequence[Token]) -> None:
        """Count and send the tokens of one step of ``generation``."""
        if not tokens:
            return
        metrics = self._metrics
        for token in tokens:
            metrics.tokens_generated += token.token >= 0
            metrics.requests_completed += token.finish in ("stop", "length")
            metrics.requests_failed += token.finish == "error"
            metrics.requests_cancelled += token.finish == "cancelled"
        self.tell(Tokens(generation, tuple(tokens)))
        self._tokens_sent_s = time.perf_counter()
        if self._gap_from_s is not None:
            metrics.swap_gap_ms_last = (self._tokens_sent_s - self._gap_from_s) * _MS
            self._gap_from_s = None

    def begin_gap(self, *, running: bool) -> None:
        """The generation was exchanged: measure from the last tokens before to the first after."""
        self._gap_from_s = self._tokens_sent_s if running else None

    def tell_load(self, schedule: Schedule, space: KvSpace, waiting: int) -> None:
        """Send the gauges, a few times a second and when the work is done."""
        now_s = time.monotonic()
        if now_s - self._load_sent_s < _LOAD_PERIOD_S and schedule.running:
            return
        self._load_sent_s = now_s
        counters = schedule.counters
        self.tell(
            Load(
                running=len(schedule.running),
                waiting=waiting,
                kv_blocks=space.pool.capacity,
                kv_blocks_used=space.pool.held,
                prefix_query_tokens=counters.prefix_query_tokens,
                prefix_hit_tokens=counters.prefix_hit_tokens,
                preemptions=counters.preemptions,
                swaps=self._metrics.swaps,
                steps=self._metrics.steps,
            )
        )
