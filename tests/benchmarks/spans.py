"""Time spans, and the gaps between tokens that fall into them. Pure; all times are ``time.monotonic_ns``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from patchctl.demo.measure import quantile


@dataclass(frozen=True, slots=True)
class Span:
    """From ``begin_ns`` to ``end_ns``, both inside."""

    begin_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        """Its length."""
        return (self.end_ns - self.begin_ns) / 1e6

    def meets(self, other: Span) -> bool:
        """True when the two share a moment."""
        return self.begin_ns <= other.end_ns and other.begin_ns <= self.end_ns

    def plus(self, seconds: float) -> Span:
        """The span and what follows it."""
        return Span(self.begin_ns, self.end_ns + int(seconds * 1e9))


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of one stream."""

    at_ns: int
    ms: float


def gaps_of(arrivals: Iterable[Sequence[int]]) -> list[Gap]:
    """Every gap of every response; the wait for a first token is none."""
    return [Gap(later, (later - earlier) / 1e6) for times in arrivals for earlier, later in itertools.pairwise(times)]


def inside(gaps: Iterable[Gap], *spans: Span) -> list[float]:
    """Milliseconds of the gaps that end in one of ``spans``."""
    return [gap.ms for gap in gaps if any(span.begin_ns <= gap.at_ns <= span.end_ns for span in spans)]


def allowed_ms(baseline: Sequence[float]) -> float:
    """The largest gap that no client can tell from the baseline: max(p99, 2 x p50)."""
    return max(quantile(baseline, 0.99), 2 * quantile(baseline, 0.5))


def decode_rate(arrivals: Sequence[Sequence[int]]) -> float:
    """Tokens per second while every sequence of a batch decodes: from the last first token to the first last one."""
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    return sum(begin < at <= end for times in arrivals for at in times) / ((end - begin) / 1e9)
