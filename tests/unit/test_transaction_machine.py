"""The transaction machine, every path of it: each ends, none skips the way back, a crash never commits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from patchctl.transaction.machine import (
    ON_PROBATION,
    TABLES,
    IllegalTransitionError,
    Kind,
    Outcome,
    Position,
    State,
    Step,
    after_crash,
)

Path = tuple[tuple[Step, Outcome], ...]


def walk(position: Position, done: Path = ()) -> Iterator[tuple[State, Path]]:
    """Every way through the machine: final state and the steps that led there."""
    if position.step is None:
        yield position.state, done
        return
    assert position.step not in dict(done), f"{position.step} runs twice"
    for outcome in Outcome:
        yield from walk(position.advance(position.step, outcome), (*done, (position.step, outcome)))


PATHS = [(kind, state, path) for kind in Kind for state, path in walk(Position.start(kind))]


def test_every_path_ends() -> None:
    assert len(PATHS) > 40
    assert all(state is not State.RUNNING for _, state, _ in PATHS)


def test_committed_exactly_when_every_step_was_ok() -> None:
    for _, state, path in PATHS:
        assert (state is State.COMMITTED) == all(outcome is Outcome.OK for _, outcome in path)


def test_no_swap_without_verification_gate_staging_and_snapshot() -> None:
    for kind, _, path in PATHS:
        passed = [step for step, outcome in path if outcome is Outcome.OK]
        if kind is Kind.DEPLOY and Step.SWAP in dict(path):
            assert passed[:4] == [Step.VERIFY, Step.GATE, Step.STAGE, Step.SNAPSHOT_BEFORE]


def test_after_a_swap_every_end_but_commit_went_through_rollback() -> None:
    for _, state, path in PATHS:
        if Step.SWAP in dict(path) and state is not State.COMMITTED:
            assert Step.ROLLBACK in dict(path)


def test_what_was_staged_is_committed_rolled_back_or_discarded() -> None:
    for _, state, path in PATHS:
        if Step.STAGE in dict(path):
            ways_out = {Step.COMMIT, Step.ROLLBACK, Step.DISCARD} & dict(path).keys()
            assert ways_out
            assert (state is State.FAILED) == (Step.DISCARD in ways_out)


@pytest.mark.parametrize("kind", Kind)
def test_illegal_steps_are_refused(kind: Kind) -> None:
    position = Position.start(kind)
    for step in Step:
        if step is not position.step:
            with pytest.raises(IllegalTransitionError):
                position.advance(step, Outcome.OK)
    with pytest.raises(IllegalTransitionError):
        Position(kind, None, State.COMMITTED).advance(Step.COMMIT, Outcome.OK)


@pytest.mark.parametrize("kind", Kind)
def test_tables_have_no_dead_row(kind: Kind) -> None:
    reached = {step for k, _, path in PATHS if k is kind for step, _ in path}
    assert reached == set(TABLES[kind])


@pytest.mark.parametrize("step", [None, *Step])
def test_a_crash_commits_only_what_was_recorded(step: Step | None) -> None:
    expected = State.ROLLED_BACK if step in ON_PROBATION else State.FAILED
    assert after_crash(step, commit_recorded=False) is expected
    assert after_crash(step, commit_recorded=True) is State.COMMITTED
