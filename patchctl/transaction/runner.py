"""Runs one transaction: intent, step, outcome, and what the machine says comes next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from patchctl.errors import PatchctlError
from patchctl.faults import reach
from patchctl.journal.journal import Journal
from patchctl.journal.record import TransactionRecord
from patchctl.transaction.machine import ON_PROBATION, Kind, Outcome, Position, State, Step

UNTOUCHED = "the active generation, untouched"

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found. ``error`` explains an outcome that is not OK."""

    outcome: Outcome = Outcome.OK
    data: dict[str, Any] = field(default_factory=dict)
    error: PatchctlError | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """The final state of a transaction and the first error that led there."""

    state: State
    error: PatchctlError | None


StepFunction = Callable[[], StepResult]


def run_transaction(
    record: TransactionRecord,
    steps: Mapping[Step, StepFunction],
    journal: Journal,
    emit: Emit,
) -> Ending:
    """Run ``record`` from its first step to a final state; never raises for a failing step.

    COMMIT's own function writes its OK outcome together with the committed generation, so that the
    two cannot part in a crash; every other outcome is written here.
    """
    kind = Kind(record.kind)
    position = Position.start(kind)
    first_error: PatchctlError | None = None
    while (step := position.step) is not None:
        reach(f"{kind}.{step}.intent")
        journal.intent(record.id, step)
        emit({"event": "step", "step": step, "phase": "intent"})
        started = time.perf_counter()
        result = _run_step(step, steps[step])
        took_ms = round((time.perf_counter() - started) * 1e3, 2)
        reach(f"{kind}.{step}.done")
        if not (step is Step.COMMIT and result.outcome is Outcome.OK):
            journal.outcome(record.id, step, result.outcome, result.data)
        reach(f"{kind}.{step}.outcome")
        first_error = first_error or result.error
        event: dict[str, Any] = {"event": "step", "step": step, "phase": result.outcome, "took_ms": took_ms}
        event["data"] = result.data
        if result.error is not None:
            event["error"] = result.error.as_dict()
        emit(event)
        position = position.advance(step, result.outcome)
    journal.finish(record.id, position.state, first_error)
    return Ending(position.state, first_error)


def _in_context(step: Step, error: PatchctlError) -> PatchctlError:
    """Say what still serves and what to run next, where the part that refused could not know."""
    serving = "the build that served before, after the exchange back" if step in ON_PROBATION else UNTOUCHED
    return replace(
        error, serving=error.serving or serving, next_command=error.next_command or "patchctl history -o json"
    )


def _run_step(step: Step, function: StepFunction) -> StepResult:
    try:
        return function()
    except PatchctlError as error:
        return StepResult(Outcome.FAILED, {}, _in_context(step, error))
    except Exception as error:
        # A step that breaks in a way nobody foresaw is a failed step: the machine then goes back.
        return StepResult(
            Outcome.FAILED,
            {},
            PatchctlError(
                code="host.internal",
                what=f"step {step} failed unexpectedly",
                why=f"{type(error).__name__}: {error}",
                serving="the generation that served before",
                next_command="patchctl history -o json",
            ),
        )
