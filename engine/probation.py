"""Probation: when a new generation is sent back without asking anybody. Pure.

Rules, from certain to statistical: a step that failed, output that is not finite, requests that fail more
often than before, steps that take longer than before. The statistical ones compare with a window before
the exchange, and like with like: a step of four sequences and a prompt is slower than a step of one, so
durations are compared per step shape, by their medians.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

Rule = Literal["failed_step", "nonfinite_output", "error_rate", "step_latency"]


@dataclass(frozen=True, slots=True)
class ProbationLimits:
    """What the new generation may do. Each limit with its reason."""

    # Either is a defect by itself: one is enough.
    nonfinite_rows_max: int = 0
    failed_steps_max: int = 0
    # Below this many, two unlucky requests look like a rate.
    requests_min: int = 20
    # Above the rate before, as a fraction of requests: 3 of 20 where none failed before.
    error_rate_rise_max: float = 0.1
    # Of one shape, on both sides: a median of fewer follows single slow steps.
    steps_min: int = 64
    # A busy neighbour on a shared core doubles the duration of a step.
    step_ratio_max: float = 3.0
    # What a reader of a stream can notice; tiny steps triple for no reason at all.
    step_rise_ms_min: float = 10.0


# The longest window kept on each side, in steps per shape and in requests: the past that counts is recent.
WINDOW_STEPS = 512
WINDOW_REQUESTS = 256
# Medians are compared this often, in steps: sorting the windows takes as long as a whole small step.
LOOK_STEPS = 32


@dataclass(frozen=True, slots=True)
class Step:
    """One step as the serve loop saw it.

    Attributes:
        shape: what durations depend on besides the build; steps of equal shape are compared.
        step_ms: its duration.
        nonfinite_rows: rows of logits that were not finite.
        completed: requests that ended well in it.
        errors: requests that ended with an error.
        failed: it raised.
    """

    shape: Hashable
    step_ms: float
    nonfinite_rows: int = 0
    completed: int = 0
    errors: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Breach:
    """Why the new generation goes back, in numbers."""

    rule: Rule
    what: str


class _Window:
    """Durations per shape and ends of requests, newest kept."""

    def __init__(self) -> None:
        self.steps: dict[Hashable, deque[float]] = {}
        self.errors: deque[bool] = deque(maxlen=WINDOW_REQUESTS)

    def add(self, step: Step) -> None:
        durations = self.steps.get(step.shape)
        if durations is None:
            durations = self.steps[step.shape] = deque(maxlen=WINDOW_STEPS)
        durations.append(step.step_ms)
        if step.completed or step.errors:
            self.errors.extend([False] * step.completed + [True] * step.errors)

    @property
    def error_rate(self) -> float:
        return sum(self.errors) / len(self.errors) if self.errors else 0.0


class Probation:
    """Watches every step; judges between :meth:`begin` and :meth:`end`."""

    def __init__(self, limits: ProbationLimits | None = None) -> None:
        self._limits = ProbationLimits() if limits is None else limits
        self._before = _Window()
        self._after: _Window | None = None
        self._failed_steps = 0
        self._nonfinite_rows = 0
        self._steps = 0
        self._breach: Breach | None = None

    @property
    def running(self) -> bool:
        """True while a new generation is being judged."""
        return self._after is not None

    def begin(self) -> None:
        """The new generation serves from the next step on; what was seen so far is the window before."""
        self._after = _Window()
        self._failed_steps = self._nonfinite_rows = self._steps = 0
        self._breach = None

    def end(self, *, committed: bool) -> None:
        """Committed: its window is the one to compare with from now on. Else the old one goes on."""
        if committed and self._after is not None:
            self._before = self._after
        self._after = None

    def observe(self, step: Step) -> None:
        """Look at one step of the serving generation."""
        if self._after is None:
            self._before.add(step)
            return
        self._after.add(step)
        self._steps += 1
        self._failed_steps += step.failed
        self._nonfinite_rows += step.nonfinite_rows
        if self._breach is None:
            self._breach = self._judge(self._after, step)

    def breach(self) -> Breach | None:
        """The first limit passed since :meth:`begin`, if any; it stays until the next one."""
        return self._breach

    def _judge(self, after: _Window, step: Step) -> Breach | None:
        limits = self._limits
        if self._failed_steps > limits.failed_steps_max:
            return Breach("failed_step", f"{self._failed_steps} steps failed, {limits.failed_steps_max} may")
        if self._nonfinite_rows > limits.nonfinite_rows_max:
            what = f"{self._nonfinite_rows} rows of logits were not finite, {limits.nonfinite_rows_max} may be"
            return Breach("nonfinite_output", what)
        if step.errors and len(after.errors) >= limits.requests_min:
            rise = after.error_rate - self._before.error_rate
            if rise > limits.error_rate_rise_max:
                return Breach(
                    "error_rate",
                    f"{after.error_rate:.1%} of {len(after.errors)} requests failed, {self._before.error_rate:.1%} "
                    f"before; {limits.error_rate_rise_max:.0%} more may",
                )
        if self._steps % LOOK_STEPS == 0:
            return self._slower(after)
        return None

    def _slower(self, after: _Window) -> Breach | None:
        limits = self._limits
        for shape, durations in after.steps.items():
            past = self._before.steps.get(shape, ())
            if min(len(past), len(durations)) < limits.steps_min:
                continue
            now_ms, then_ms = statistics.median(durations), statistics.median(past)
            if now_ms > limits.step_ratio_max * then_ms and now_ms - then_ms >= limits.step_rise_ms_min:
                return Breach(
                    "step_latency",
                    f"steps of shape {shape} take {now_ms:.1f} ms, {then_ms:.1f} ms before; "
                    f"{limits.step_ratio_max:g} times that may be",
                )
        return None
