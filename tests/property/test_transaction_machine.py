"""The transaction machine: every path ends, no path skips the way back, a crash never commits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

OUTCOMES = st.lists(st.sampled_from(Outcome), min_size=1, max_size=30)


def walk(kind: Kind, outcomes: list[Outcome]) -> tuple[Position, list[tuple[Step, Outcome]]]:
    position, done = Position.start(kind), []
    for outcome in outcomes:
        if position.step is None:
            break
        done.append((position.step, outcome))
        position = position.advance(position.step, outcome)
    return position, done


@given(st.sampled_from(Kind), OUTCOMES)
def test_every_path_ends_within_its_steps(kind: Kind, outcomes: list[Outcome]) -> None:
    position, done = walk(kind, outcomes + [Outcome.OK] * len(Step))
    assert position.state is not State.RUNNING
    assert len({step for step, _ in done}) == len(done), "a step ran twice"


@given(st.sampled_from(Kind), OUTCOMES)
def test_committed_only_when_every_step_was_ok(kind: Kind, outcomes: list[Outcome]) -> None:
    position, done = walk(kind, outcomes + [Outcome.OK] * len(Step))
    all_ok = all(outcome is Outcome.OK for _, outcome in done)
    assert (position.state is State.COMMITTED) == all_ok


@given(OUTCOMES)
def test_no_swap_without_gate_and_snapshot(outcomes: list[Outcome]) -> None:
    _, done = walk(Kind.DEPLOY, outcomes + [Outcome.OK] * len(Step))
    passed = [step for step, outcome in done if outcome is Outcome.OK]
    if Step.SWAP in dict(done):
        assert passed[:4] == [Step.VERIFY, Step.GATE, Step.STAGE, Step.SNAPSHOT_BEFORE]


@given(st.sampled_from(Kind), OUTCOMES)
def test_after_a_swap_every_end_but_commit_went_through_rollback(kind: Kind, outcomes: list[Outcome]) -> None:
    position, done = walk(kind, outcomes + [Outcome.OK] * len(Step))
    steps = dict(done)
    if Step.SWAP in steps and position.state is not State.COMMITTED:
        assert Step.ROLLBACK in steps


@pytest.mark.parametrize("kind", Kind)
def test_illegal_steps_are_refused(kind: Kind) -> None:
    position = Position.start(kind)
    for step in Step:
        if step is not position.step:
            with pytest.raises(IllegalTransitionError):
                position.advance(step, Outcome.OK)
    end, _ = walk(kind, [Outcome.OK] * len(Step))
    with pytest.raises(IllegalTransitionError):
        end.advance(Step.COMMIT, Outcome.OK)


@pytest.mark.parametrize("kind", Kind)
def test_tables_are_closed_and_reachable(kind: Kind) -> None:
    table = TABLES[kind]
    targets = {following for row in table.values() for following in row}
    assert {step for step in targets if isinstance(step, Step)} | {Step.VERIFY} == set(table)
    assert all(len(row) == len(Outcome) for row in table.values())


@pytest.mark.parametrize("step", [None, *Step])
def test_a_crash_commits_only_what_was_recorded(step: Step | None) -> None:
    expected = State.ROLLED_BACK if step in ON_PROBATION else State.FAILED
    assert after_crash(step, commit_recorded=False) is expected
    assert after_crash(step, commit_recorded=True) is State.COMMITTED
