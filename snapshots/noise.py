"""How far a process's memory moves by itself, learnt from its own idle times. Pure.

While no request completes and no token is made, whatever the anonymous memory does is noise: timers, the collector,
the sampler's own questions. Two floors that differ by less than that say nothing about requests.

Only movement that comes back counts. A rise that stays is a leak in the background, and a leak must not teach the
verdict to overlook it: net drift is taken off. And noise excuses nothing: growth that noise could feign is ``unknown``
instead of ``growth``, never ``unchanged``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from snapshots.growth import MemorySample


@dataclass(frozen=True, slots=True)
class NoiseLimits:
    """What counts as idle.

    Attributes:
        settle_s: after the last token; buffers of the request are given back meanwhile.
        span_s_min: a shorter pause lies between two requests of one client: it is part of the load.
        samples_min: fewer may miss the peak of what happens every second.
    """

    settle_s: float = 0.5
    span_s_min: float = 1.0
    samples_min: int = 5


@dataclass(frozen=True, slots=True)
class IdleNoise:
    """Bytes by which anonymous memory moved and came back, at most, in ``spans`` idle spans."""

    bytes: int
    spans: int


_DEFAULT_LIMITS = NoiseLimits()


def learn_noise(samples: Sequence[MemorySample], limits: NoiseLimits = _DEFAULT_LIMITS) -> IdleNoise | None:
    """What the idle spans among ``samples`` (one process, in time order) teach; None without any."""
    moved = [
        max(span) - min(span) - abs(span[-1] - span[0])
        for span in _idle_spans(samples, limits)
        if len(span) >= limits.samples_min
    ]
    return IdleNoise(max(moved), len(moved)) if moved else None


def _idle_spans(samples: Sequence[MemorySample], limits: NoiseLimits) -> Iterator[list[int]]:
    """Anonymous bytes of every span without progress, its settling left out."""
    for _, group in groupby(samples, key=lambda sample: (sample.requests_completed, sample.tokens)):
        span = list(group)
        settled = [sample for sample in span if sample.t_s >= span[0].t_s + limits.settle_s]
        if settled and settled[-1].t_s - settled[0].t_s >= limits.span_s_min:
            yield [sample.anonymous_bytes for sample in settled]


def margin_per_request(idle: IdleNoise | None, requests: int, margin_bytes_min: int) -> int:
    """Growth per request that noise alone can feign over a window of ``requests``.

    Noise can lift one end of the window against the other once, so it weighs less the more requests lie between.

    Args:
        idle: what was learnt, if anything.
        requests: completed in the window.
        margin_bytes_min: the fixed margin, which holds in any case.
    """
    return max(margin_bytes_min, 0 if idle is None else idle.bytes // max(requests, 1))
