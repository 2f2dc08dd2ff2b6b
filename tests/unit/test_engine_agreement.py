"""Tensor-parallel agreement, message by message; the simulation has the interleavings."""

from __future__ import annotations

import pytest

from engine.agreement import (
    AgreementLimits,
    Announce,
    Ask,
    Attempt,
    Confirm,
    Coordinator,
    Decision,
    Outbox,
    Propose,
    Query,
    Rank,
    Step,
)
from engine.errors import SwapRefusedError

LIMITS = AgreementLimits(margin_iterations=4, silence_s_max=2.0, resend_s=0.1)
FIRST = Attempt(group=1, serial=1)


def coordinator() -> Coordinator:
    made = Coordinator(2, 1, LIMITS)
    attempt, outbox = made.start(7, 0.0)
    assert (attempt, outbox) == (FIRST, [(0, Ask(FIRST, 7)), (1, Ask(FIRST, 7))])
    return made


def announced() -> Coordinator:
    made = coordinator()
    assert made.receive(Propose(FIRST, 0, 10), 0.0) == []
    expected = Announce(FIRST, 16)  # the later of the two, and the margin
    assert made.receive(Propose(FIRST, 1, 12), 0.0) == [(0, expected), (1, expected)]
    return made


def decided(outbox: Outbox) -> str:
    """Why it was aborted, "" for a commit; everybody is told the same."""
    decisions = {message for _, message in outbox}
    assert [to for to, _ in outbox] == [0, 1]
    (decision,) = decisions
    assert isinstance(decision, Decision)
    assert decision.commit == (decision.why == "")
    return decision.why


def rank(earliest: int | str = 10) -> Rank:
    return Rank(1, 2, 1, lambda _generation: earliest, LIMITS)


def bound() -> Rank:
    made = rank()
    assert made.receive(Ask(FIRST, 7)) == [(0, Propose(FIRST, 1, 10))]
    assert made.receive(Announce(FIRST, 16)) == [(0, Confirm(FIRST, 1, yes=True))]
    return made


def test_everybody_confirms_and_it_commits() -> None:
    leader = announced()
    assert leader.receive(Confirm(FIRST, 1, yes=True), 0.0) == []
    assert decided(leader.receive(Confirm(FIRST, 0, yes=True), 0.0)) == ""
    assert leader.undecided is None


def test_a_repeated_confirmation_counts_once() -> None:
    leader = announced()
    for _ in range(3):
        assert leader.receive(Confirm(FIRST, 1, yes=True), 0.0) == []


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda leader: leader.receive(Confirm(FIRST, 1, yes=False), 0.0), "rank 1 was past iteration 16"),
        (lambda leader: leader.died(1), "rank 1 died"),
        (lambda leader: leader.boundary(16), "undecided at iteration 16"),
        (lambda leader: leader.tick(2.0), "no answer from ranks [0, 1] for 2 s"),
    ],
)
def test_one_failure_aborts_it_for_all(happens: object, why: str) -> None:
    leader = announced()
    assert decided(happens(leader)) == why  # type: ignore[operator]
    # Too late to change it.
    assert leader.receive(Confirm(FIRST, 0, yes=True), 0.0) == []
    assert leader.receive(Confirm(FIRST, 1, yes=True), 0.0) == []


def test_a_refusal_aborts_before_anybody_is_bound() -> None:
    leader = coordinator()
    assert decided(leader.receive(Propose(FIRST, 1, None, "still staging"), 0.0)) == "rank 1 refused: still staging"


def test_silence_before_the_announcement_aborts_too() -> None:
    leader = coordinator()
    leader.receive(Propose(FIRST, 0, 10), 0.0)
    assert decided(leader.tick(2.0)) == "no answer from ranks [1] for 2 s"


def test_only_those_who_did_not_answer_are_asked_again() -> None:
    leader = coordinator()
    leader.receive(Propose(FIRST, 0, 10), 0.0)
    assert leader.tick(0.05) == []
    assert leader.tick(0.1) == [(1, Ask(FIRST, 7))]
    leader.receive(Propose(FIRST, 1, 12), 0.1)
    leader.receive(Confirm(FIRST, 1, yes=True), 0.1)
    assert leader.tick(0.25) == [(0, Announce(FIRST, 16))]


def test_a_second_attempt_waits_for_the_first() -> None:
    leader = coordinator()
    with pytest.raises(SwapRefusedError) as refused:
        leader.start(8, 0.0)
    assert refused.value.code == "swap_pending"
    leader.died(1)
    with pytest.raises(SwapRefusedError) as refused:
        leader.start(8, 0.0)
    assert refused.value.code == "rank_dead"


def test_queries_are_answered_once_it_is_decided() -> None:
    leader = announced()
    assert leader.receive(Query(FIRST, 1), 0.0) == []
    leader.receive(Confirm(FIRST, 0, yes=True), 0.0)
    leader.receive(Confirm(FIRST, 1, yes=True), 0.0)
    assert leader.receive(Query(FIRST, 1), 0.0) == [(1, Decision(FIRST, commit=True))]
    assert leader.receive(Query(Attempt(1, 0), 1), 0.0) == [(1, Decision(Attempt(1, 0), commit=False, why="aborted"))]
    assert leader.receive(Query(Attempt(9, 1), 1), 0.0) == [], "another group's"


def test_a_rank_exchanges_at_its_boundary_and_not_before() -> None:
    follower = bound()
    follower.receive(Decision(FIRST, commit=True))
    steps = [follower.boundary(iteration, 0.0)[0] for iteration in range(18)]
    assert [iteration for iteration, step in enumerate(steps) if step is Step.EXCHANGE] == [16]
    assert steps.count(Step.PASS) == 17


def test_a_bound_rank_in_doubt_holds_and_asks_everybody() -> None:
    follower = bound()
    for iteration in range(16):
        assert follower.boundary(iteration, 0.0) == (Step.PASS, [])
    assert follower.boundary(16, 1.0) == (Step.HOLD, [(0, Query(FIRST, 1))])
    assert follower.in_doubt
    assert follower.boundary(16, 1.05) == (Step.HOLD, []), "not with every breath"
    assert follower.boundary(16, 1.1)[1] == [(0, Query(FIRST, 1))]
    follower.receive(Decision(FIRST, commit=False, why="rank 0 died"))
    assert follower.boundary(16, 1.2) == (Step.PASS, [])


def test_a_peer_that_knows_tells() -> None:
    follower = bound()
    assert follower.receive(Query(FIRST, 0)) == []
    follower.receive(Decision(FIRST, commit=True))
    assert follower.receive(Query(FIRST, 0)) == [(0, Decision(FIRST, commit=True))]
    assert follower.receive(Query(Attempt(1, 2), 0)) == []


def test_who_is_past_the_boundary_does_not_confirm() -> None:
    follower = rank()
    follower.receive(Ask(FIRST, 7))
    for iteration in range(17):
        follower.boundary(iteration, 0.0)
    assert follower.receive(Announce(FIRST, 16)) == [(0, Confirm(FIRST, 1, yes=False))]
    assert not follower.in_doubt


def test_who_never_proposed_does_not_confirm() -> None:
    """A rank that restarted meanwhile: it knows nothing of what its predecessor promised."""
    assert rank().receive(Announce(FIRST, 16)) == [(0, Confirm(FIRST, 1, yes=False))]


def test_a_stale_announcement_binds_nobody() -> None:
    follower, second = rank(), Attempt(1, 2)
    follower.receive(Ask(FIRST, 7))
    follower.receive(Ask(second, 8))
    assert follower.receive(Announce(FIRST, 16)) == [(0, Confirm(FIRST, 1, yes=False))]
    assert not follower.in_doubt


def test_a_bound_rank_refuses_another_attempt() -> None:
    follower, second = bound(), Attempt(1, 2)
    assert follower.receive(Ask(second, 8)) == [(0, Propose(second, 1, None, "bound by attempt 1"))]
    follower.receive(Decision(FIRST, commit=True))
    assert follower.receive(Ask(second, 8)) == [(0, Propose(second, 1, None, "bound by attempt 1"))]
    for iteration in range(17):
        follower.boundary(iteration, 0.0)
    assert follower.receive(Ask(second, 8)) == [(0, Propose(second, 1, 17))]


def test_repeated_questions_get_the_same_answer() -> None:
    follower = rank()
    first = follower.receive(Ask(FIRST, 7))
    for iteration in range(12):
        follower.boundary(iteration, 0.0)
    assert follower.receive(Ask(FIRST, 7)) == first
    follower.receive(Decision(FIRST, commit=False, why="late"))
    assert follower.receive(Ask(FIRST, 7)) == [(0, Propose(FIRST, 1, None, "already decided"))]


def test_a_rank_that_cannot_says_why() -> None:
    assert rank("still staging").receive(Ask(FIRST, 7)) == [(0, Propose(FIRST, 1, None, "still staging"))]


def test_messages_of_another_group_are_ignored() -> None:
    follower, stranger = bound(), Attempt(2, 1)
    for message in (Ask(stranger, 7), Announce(stranger, 16), Decision(stranger, commit=True), Query(stranger, 0)):
        assert follower.receive(message) == []
    assert follower.in_doubt
