"""Memory growth per request, from samples of one process under traffic. Pure.

The estimate is Theil-Sen (the median of all pairwise slopes) over *floors*, with Sen's order-statistic interval
(Sen 1968, J. Am. Stat. Assoc. 63:1379, from Kendall's exact distribution). Why so, for a bake of 10-20 s with about
1 request/s, 40 tokens/s and 2-4 samples/s:

- **Floors.** A request in flight holds memory that it gives back, so single samples ride a sawtooth as tall as a
  leak. All samples with the same number of completed requests form one level, and only its minimum counts: memory
  in flight can raise a sample, never lower it. Beyond 48 levels, levels are pooled; the floors stay.
- **Requests before tokens.** What a request leaves behind becomes visible when it completes, so completed requests
  are the natural clock: floors against it lie on a line, whatever the requests' lengths. Tokens advance finer but turn
  that line into a staircase whose risers look like noise and whose samples are not independent. Hence tokens stand
  in only when fewer than 5 levels exist (bytes per token, times tokens per request, over 8 bins), and only if 2
  requests completed: with one alone, growth and memory in flight cannot be told apart.
- **Steps.** A cache filled once or an arena opened lifts all later floors; in the middle of a window that breaks
  Theil-Sen (half of all pairs straddle it). One upward and one downward jump that stand out from all other increments
  are taken out and reported as one-time; two jumps up are a pattern and stay in. A single level far above both its
  neighbours is dropped.
- **Interval.** Levels are few, so Kendall's distribution is computed exactly instead of by its normal limit. At 5
  levels the 95 % interval is the full range of the slopes: honest, and wide.

A leak that touches new pages less than once per window (e.g. behind 2 MiB transparent huge pages) shows as one step or
not at all: the verdict prints the step; longer windows are the trend analyser's part.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One reading. ``t_s`` is monotonic; the counters never fall while the process lives."""

    t_s: float
    anonymous_bytes: int
    requests_completed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """When samples carry an estimate, and what counts as a step.

    Attributes:
        samples_min: fewer say nothing; a 10 s bake at the slowest advised rate (2/s) gives 20.
        levels_min: 5 points are the fewest for which a 95 % interval exists (4 reach 92 %).
        levels_max: more add no precision but cost n² slopes; 48 levels are 1128 slopes, under a millisecond.
        token_bins: 8 bins keep several samples in each, so a bin's floor lies between two requests.
        token_requests_min: see the module's docstring.
        step_bytes_min: smaller jumps can't upset a verdict; malloc grows a heap by 132 KiB at a time.
        step_deviations_min: how far a jump must stand out, in scaled median absolute deviations of the increments.
        interval_alpha: two-sided error of the interval.
    """

    samples_min: int = 10
    levels_min: int = 5
    levels_max: int = 48
    token_bins: int = 8
    token_requests_min: int = 2
    step_bytes_min: int = 256 << 10
    step_deviations_min: float = 8.0
    interval_alpha: float = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """A one-time jump of the floor, after ``requests`` (or tokens, as the estimate's ``progress``) completed."""

    progress: float
    bytes: int


@dataclass(frozen=True, slots=True)
class GrowthEstimate:
    """Bytes of anonymous memory kept per completed request, with its 95 % interval.

    Attributes:
        progress: what the floors were laid against.
        levels: floors used.
        requests: completed in the window.
        tokens: generated in the window.
        steps: one-time jumps that were taken out.
    """

    bytes_per_request: float
    low: float
    high: float
    progress: Literal["requests", "tokens"]
    levels: int
    requests: int
    tokens: int
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Insufficient:
    """The samples don't carry an estimate; ``reason`` says what is missing."""

    reason: str


Growth = GrowthEstimate | Insufficient

_Point = tuple[float, float]
_DEFAULT_LIMITS = GrowthLimits()
# Makes the median absolute deviation of normal noise equal its standard deviation.
_MAD_SCALE = 1.4826


def estimate_growth(samples: Sequence[MemorySample], limits: GrowthLimits = _DEFAULT_LIMITS) -> Growth:
    """Estimate growth per request from the samples of one window, in time order."""
    if len(samples) < limits.samples_min:
        return Insufficient(f"{len(samples)} samples; at least {limits.samples_min} are needed")
    if any(
        b.t_s < a.t_s or b.requests_completed < a.requests_completed or b.tokens < a.tokens
        for a, b in pairwise(samples)
    ):
        return Insufficient("time or a counter went backwards: the window spans a restart")
    requests = samples[-1].requests_completed - samples[0].requests_completed
    tokens = samples[-1].tokens - samples[0].tokens
    floors = _floors([(s.requests_completed, s.anonymous_bytes) for s in samples], limits.levels_max)
    if len(floors) >= limits.levels_min:
        return _estimate(floors, "requests", requests, tokens, limits)
    if requests < limits.token_requests_min:
        return Insufficient(
            f"{requests} requests completed; {limits.levels_min - 1} give an estimate, {limits.token_requests_min} a "
            "coarse one: extend the bake, or send traffic"
        )
    floors = _floors([(s.tokens, s.anonymous_bytes) for s in samples], limits.token_bins)
    if len(floors) < limits.levels_min:
        return Insufficient(f"{requests} requests and {tokens} tokens are too few levels to fit: extend the bake")
    return _estimate(floors, "tokens", requests, tokens, limits)


def _floors(points: Sequence[_Point], levels_max: int) -> list[_Point]:
    """The lowest point of every level of progress; pools levels into equal widths when there are too many."""
    first, last = points[0][0], points[-1][0]
    levels = {x for x, _ in points}
    width = (last - first) / levels_max
    lowest: dict[float, _Point] = {}
    for x, y in points:
        level = x if len(levels) <= levels_max else min(int((x - first) / width), levels_max - 1)
        if level not in lowest or y < lowest[level][1]:
            lowest[level] = (x, y)
    return [lowest[level] for level in sorted(lowest)]


def _estimate(
    floors: list[_Point],
    progress: Literal["requests", "tokens"],
    requests: int,
    tokens: int,
    limits: GrowthLimits,
) -> GrowthEstimate:
    per_request = 1.0 if progress == "requests" else tokens / requests
    level, steps = _without_steps(floors, limits)
    slopes = sorted((yb - ya) / (xb - xa) for i, (xa, ya) in enumerate(level) for xb, yb in level[i + 1 :])
    rank = _interval_rank(len(level), limits.interval_alpha)
    return GrowthEstimate(
        bytes_per_request=statistics.median(slopes) * per_request,
        low=slopes[rank - 1] * per_request,
        high=slopes[-rank] * per_request,
        progress=progress,
        levels=len(level),
        requests=requests,
        tokens=tokens,
        steps=steps,
    )


def _without_steps(floors: list[_Point], limits: GrowthLimits) -> tuple[list[_Point], tuple[Step, ...]]:
    """Level the floors over at most one upward and one downward jump; more in one direction are no one-time event."""
    floors = _without_spikes(floors, limits)
    excess, threshold = _excess(floors, limits)
    up = [i for i, e in enumerate(excess) if e > threshold]
    down = [i for i, e in enumerate(excess) if -e > threshold]
    if _events(up) > 1 or _events(down) > 1:
        return floors, ()
    steps = tuple(Step(floors[i + 1][0], round(excess[i])) for i in sorted(up + down))
    return [(x, y - sum(step.bytes for step in steps if x >= step.progress)) for x, y in floors], steps


def _events(jumps: list[int]) -> int:
    """Jumps in consecutive increments are one event that took longer."""
    return sum(1 for i in jumps if i - 1 not in jumps)


def _without_spikes(floors: list[_Point], limits: GrowthLimits) -> list[_Point]:
    """Drop floors that tower over both neighbours: every sample of that level caught a request in flight."""
    excess, threshold = _excess(floors, limits)
    spikes = {i + 1 for i, (rise, fall) in enumerate(pairwise(excess)) if rise > threshold and -fall > threshold}
    kept = [point for i, point in enumerate(floors) if i not in spikes]
    return kept if len(kept) >= limits.levels_min else floors


def _excess(floors: list[_Point], limits: GrowthLimits) -> tuple[list[float], float]:
    """How far each increment departs from the usual rate, and from where on a departure is a jump."""
    increments = [(xb - xa, yb - ya) for (xa, ya), (xb, yb) in pairwise(floors)]
    rate = statistics.median(dy / dx for dx, dy in increments)
    excess = [dy - rate * dx for dx, dy in increments]
    deviation = _MAD_SCALE * statistics.median(abs(e) for e in excess)
    return excess, max(limits.step_bytes_min, limits.step_deviations_min * deviation)


def _interval_rank(points: int, alpha: float) -> int:
    """Rank of the slope that bounds the interval, counted from either end (1 = the extreme).

    The number of slopes below the true one is distributed as the inversions of a random permutation; the
    distribution is built by inserting one point at a time.
    """
    chance = [1.0]
    for size in range(2, points + 1):
        grown = [0.0] * (len(chance) + size - 1)
        for inversions, p in enumerate(chance):
            for added in range(size):
                grown[inversions + added] += p / size
        chance = grown
    below, rank = 0.0, 0
    while below + chance[rank] <= alpha / 2:
        below += chance[rank]
        rank += 1
    return max(rank, 1)
