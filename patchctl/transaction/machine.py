"""The host transaction as a pure machine: which step follows which outcome, and what a crash means.

Everything that decides is in the two tables below; the runner only executes what they say.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from patchctl.errors import ExitCode


class Step(enum.StrEnum):
    """One unit of work: its intent is journalled before, its outcome after."""

    VERIFY = "verify"
    GATE = "gate"
    STAGE = "stage"
    SNAPSHOT_BEFORE = "snapshot-before"
    SWAP = "swap"
    BAKE = "bake"
    SNAPSHOT_AFTER = "snapshot-after"
    VERDICT = "verdict"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    DISCARD = "discard"


class Outcome(enum.StrEnum):
    """How a step ended. ``hold`` is evidence that is neither good nor bad."""

    OK = "ok"
    FAILED = "failed"
    HOLD = "hold"


class State(enum.StrEnum):
    """Where a transaction is. All but ``RUNNING`` are final."""

    RUNNING = "running"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"
    REFUSED = "refused"
    HELD = "held"
    FAILED = "failed"
    ROLLBACK_INCOMPLETE = "rollback-incomplete"


class Kind(enum.StrEnum):
    """What the operator asked for."""

    DEPLOY = "deploy"
    ROLLBACK = "rollback"


class IllegalTransitionError(RuntimeError):
    """A step or outcome that the table does not have: a defect of the caller."""


_S = Step
Table = Mapping[Step, tuple[Step | State, Step | State, Step | State]]

# Before SWAP a failure leaves the active build untouched: DISCARD only frees what was staged.
# From SWAP on, every way out that is not COMMIT exchanges back. An inconclusive verdict rolls back:
# silence is never success.
DEPLOY: Final[Table] = MappingProxyType(
    {
        #  step                  ok                    failed                     hold
        _S.VERIFY:          (_S.GATE,             State.REFUSED,             State.REFUSED),
        _S.GATE:            (_S.STAGE,            State.REFUSED,             State.HELD),
        _S.STAGE:           (_S.SNAPSHOT_BEFORE,  _S.DISCARD,                _S.DISCARD),
        _S.SNAPSHOT_BEFORE: (_S.SWAP,             _S.DISCARD,                _S.DISCARD),
        _S.SWAP:            (_S.BAKE,             _S.ROLLBACK,               _S.ROLLBACK),
        _S.BAKE:            (_S.SNAPSHOT_AFTER,   _S.ROLLBACK,               _S.ROLLBACK),
        _S.SNAPSHOT_AFTER:  (_S.VERDICT,          _S.ROLLBACK,               _S.ROLLBACK),
        _S.VERDICT:         (_S.COMMIT,           _S.ROLLBACK,               _S.ROLLBACK),
        _S.COMMIT:          (State.COMMITTED,     _S.ROLLBACK,               _S.ROLLBACK),
        _S.ROLLBACK:        (State.ROLLED_BACK,   State.ROLLBACK_INCOMPLETE, State.ROLLBACK_INCOMPLETE),
        _S.DISCARD:         (State.FAILED,        State.FAILED,              State.FAILED),
    }
)  # fmt: skip

# Going back needs only the host: the target is already recorded and hashed, so there is no gate to
# ask, nothing to bake and no verdict to wait for.
ROLLBACK: Final[Table] = MappingProxyType(
    {
        _S.VERIFY:          (_S.STAGE,            State.REFUSED,             State.REFUSED),
        _S.STAGE:           (_S.SWAP,             _S.DISCARD,                _S.DISCARD),
        _S.SWAP:            (_S.COMMIT,           _S.ROLLBACK,               _S.ROLLBACK),
        _S.COMMIT:          (State.COMMITTED,     _S.ROLLBACK,               _S.ROLLBACK),
        _S.ROLLBACK:        (State.ROLLED_BACK,   State.ROLLBACK_INCOMPLETE, State.ROLLBACK_INCOMPLETE),
        _S.DISCARD:         (State.FAILED,        State.FAILED,              State.FAILED),
    }
)  # fmt: skip

TABLES: Final = MappingProxyType({Kind.DEPLOY: DEPLOY, Kind.ROLLBACK: ROLLBACK})
_COLUMN: Final = MappingProxyType({Outcome.OK: 0, Outcome.FAILED: 1, Outcome.HOLD: 2})

# While one of these is the last step with an intent, the new generation may be the one serving.
ON_PROBATION: Final = frozenset({Step.SWAP, Step.BAKE, Step.SNAPSHOT_AFTER, Step.VERDICT, Step.COMMIT, Step.ROLLBACK})

# A committed rollback is what the operator asked for, so it is 0, not 10.
EXIT_CODES: Final = MappingProxyType(
    {
        State.COMMITTED: ExitCode.OK,
        State.ROLLED_BACK: ExitCode.ROLLED_BACK,
        State.HELD: ExitCode.HELD,
        State.ROLLBACK_INCOMPLETE: ExitCode.ROLLBACK_INCOMPLETE,
    }
)


@dataclass(frozen=True, slots=True)
class Position:
    """Where one transaction stands: the step to run next, or the final state."""

    kind: Kind
    step: Step | None
    state: State

    @staticmethod
    def start(kind: Kind) -> Position:
        """The first step of a transaction of ``kind``."""
        return Position(kind, Step.VERIFY, State.RUNNING)

    def advance(self, step: Step, outcome: Outcome) -> Position:
        """The position after ``step`` ended with ``outcome``.

        Raises:
            IllegalTransitionError: the transaction is final, or stands at another step.
        """
        if self.step is None or step != self.step:
            raise IllegalTransitionError(f"{step} ended while the transaction stood at {self.step or self.state}")
        following: Step | State = TABLES[self.kind][step][_COLUMN[outcome]]
        if isinstance(following, State):
            return Position(self.kind, None, following)
        return Position(self.kind, following, State.RUNNING)


def after_crash(last_intent: Step | None, *, commit_recorded: bool) -> State:
    """The final state of a transaction whose host died while ``last_intent`` was the newest intent.

    A restarted host serves the last committed build. COMMIT writes that in the same database
    transaction as its outcome, so the recorded outcome, and nothing else, says which build that is.
    """
    if commit_recorded:
        return State.COMMITTED
    if last_intent in ON_PROBATION:
        return State.ROLLED_BACK
    return State.FAILED
