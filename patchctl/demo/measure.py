"""Turns what the clients and the journal wrote down into the demo's table. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from patchctl.demo.response import Response

# A swap can reach a client a step later than the exchange, and a stream needs two tokens for a gap.
_SWAP_TAIL_NS = 1_500_000_000


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between two tokens of one stream, in ms."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value with at least ``q`` of all values at or below it (inverse of the step function)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)] if ordered else math.nan


def gaps_between(responses: Sequence[Response], start_ns: int, end_ns: int) -> Gaps:
    """All gaps that end inside the window."""
    gaps = [gap for response in responses for at, gap in response.gaps if start_ns <= at <= end_ns]
    return Gaps(len(gaps), quantile(gaps, 0.5), quantile(gaps, 0.99), max(gaps, default=math.nan))


def step_window(transaction: dict[str, Any], step: str) -> tuple[int, int] | None:
    """Begin and end of a step in ns, from the journal, or None when it did not run."""
    times = {
        record["phase"] == "intent": record["at_unix_ns"] for record in transaction["steps"] if record["step"] == step
    }
    return (times[True], times[False]) if len(times) == len((True, False)) else None


def swap_gaps(responses: Sequence[Response], transaction: dict[str, Any], step: str) -> Gaps | None:
    """Gaps while a swap (or the swap back) was under way."""
    window = step_window(transaction, step)
    return None if window is None else gaps_between(responses, window[0], window[1] + _SWAP_TAIL_NS)


def step_data(transaction: dict[str, Any], step: str) -> dict[str, Any]:
    """The evidence a step left in the journal; empty when it did not run."""
    found: dict[str, Any] = {}
    for record in transaction["steps"]:
        if record["step"] == step and record["phase"] != "intent":
            found = record["data"]
    return found


def step_times_ms(transaction: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of each step that ran."""
    times = {}
    for step in dict.fromkeys(record["step"] for record in transaction["steps"]):
        window = step_window(transaction, step)
        if window is not None:
            times[step] = round((window[1] - window[0]) / 1e6, 1)
    return times
