"""Tensor-parallel agreement on the iteration at which all ranks exchange. Pure.

Every step of a tensor-parallel group runs on all ranks together, so they must exchange between the same
two iterations. Two-phase commit (Gray, "Notes on data base operating systems", 1978) with the iteration
as its deadline:

1. the coordinator asks; each rank *proposes* the earliest boundary it can make, or refuses;
2. the coordinator picks the latest of these plus a margin and announces it; each rank that will still be
   before that boundary *confirms*, and is bound from then on: it may not pass that boundary undecided;
3. with all confirmations the coordinator decides to commit, in every other case to abort: a rank that
   refuses, is silent, late or dead aborts it for all, and so does the boundary itself, when it arrives at
   the coordinator first.

A bound rank at the boundary without a decision holds, and asks everybody; whoever knows tells. A hold
costs no more than the others wait anyway, in the first collective that lacks this rank. If the coordinator
died and no rank knows its decision, the rank holds until the group is restarted, which a dead rank makes
necessary at any rate: collectives cannot complete without it.

Messages may be lost, repeated, reordered and late. They carry the group's incarnation, a fresh one after any
rank restarted, and the attempt; whatever belongs to another group or attempt is ignored, so a restarted rank
can neither confirm nor decide what its predecessor began.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.errors import SwapRefusedError

COORDINATOR = 0


@dataclass(frozen=True, slots=True)
class AgreementLimits:
    """Each with its reason."""

    # Iterations between the latest proposal and the boundary: an iteration takes milliseconds, and the
    # announcement and its confirmations are two messages on one host.
    margin_iterations: int = 8
    # Silence after which a rank is taken for gone; a step that prefills a long prompt stays below.
    silence_s_max: float = 2.0
    # Between two copies of a message that was not answered.
    resend_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Attempt:
    """Names one attempt in one incarnation of the group."""

    group: int
    serial: int


@dataclass(frozen=True, slots=True)
class Ask:
    """coordinator → rank: when could you exchange to ``generation``?"""

    attempt: Attempt
    generation: int


@dataclass(frozen=True, slots=True)
class Propose:
    """rank → coordinator: at ``iteration`` or later; None refuses, and ``why`` says so."""

    attempt: Attempt
    rank: int
    iteration: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Announce:
    """coordinator → rank: the boundary before ``iteration``."""

    attempt: Attempt
    iteration: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """rank → coordinator: bound to it, or not (``yes`` False: it is too late here)."""

    attempt: Attempt
    rank: int
    yes: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """coordinator → rank, or rank → rank that asked: final. ``why`` is "" for a commit."""

    attempt: Attempt
    commit: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Query:
    """rank → everybody: what became of it?"""

    attempt: Attempt
    rank: int


Message = Ask | Propose | Announce | Confirm | Decision | Query
# Receiving rank and message.
Outbox = list[tuple[int, Message]]


class Step(enum.Enum):
    """What a rank does at a boundary."""

    PASS = "pass"  # noqa: S105 - not a password
    EXCHANGE = "exchange"
    HOLD = "hold"


class Coordinator:
    """The deciding half of rank 0; its own rank takes part like every other.

    Args:
        ranks: size of the group.
        group: incarnation of the group.
    """

    def __init__(self, ranks: int, group: int, limits: AgreementLimits | None = None) -> None:
        self._ranks = ranks
        self._group = group
        self._limits = AgreementLimits() if limits is None else limits
        self._serial = 0
        self._dead: set[int] = set()
        self._open: _Open | None = None
        # Only the newest commit can still be unknown to a rank: a bound rank refuses every later attempt.
        self._committed: Attempt | None = None

    @property
    def undecided(self) -> Attempt | None:
        """The attempt under way."""
        return None if self._open is None else self._open.attempt

    def start(self, generation: int, now_s: float) -> tuple[Attempt, Outbox]:
        """Begin an attempt.

        Raises:
            SwapRefusedError: ``swap_pending`` while another is undecided, ``rank_dead`` when one is.
        """
        if self._open is not None:
            raise SwapRefusedError("swap_pending", f"attempt {self._open.attempt.serial} is undecided")
        if self._dead:
            raise SwapRefusedError("rank_dead", f"ranks {sorted(self._dead)} are dead, the group must restart")
        self._serial += 1
        attempt = Attempt(self._group, self._serial)
        self._open = _Open(attempt, generation, now_s + self._limits.silence_s_max, now_s + self._limits.resend_s)
        return attempt, self._outstanding(self._open)

    def receive(self, message: Message, now_s: float) -> Outbox:
        """Take a proposal, a confirmation or a query."""
        opened = self._open
        if isinstance(message, Query):
            return self._tell(message)
        if opened is None or not isinstance(message, Propose | Confirm) or message.attempt != opened.attempt:
            return []
        if isinstance(message, Propose):
            return self._proposed(opened, message, now_s)
        if opened.iteration is None:
            return []
        if not message.yes:
            return self._decide(opened, f"rank {message.rank} was past iteration {opened.iteration}")
        opened.confirmed.add(message.rank)
        return self._decide(opened, "") if len(opened.confirmed) == self._ranks else []

    def tick(self, now_s: float) -> Outbox:
        """Time passed: send again what was not answered, give up on silence."""
        opened = self._open
        if opened is None:
            return []
        if now_s >= opened.give_up_s:
            silent = [rank for rank in range(self._ranks) if rank not in opened.answered]
            return self._decide(opened, f"no answer from ranks {silent} for {self._limits.silence_s_max:g} s")
        if now_s < opened.resend_s:
            return []
        opened.resend_s = now_s + self._limits.resend_s
        return self._outstanding(opened)

    def died(self, rank: int) -> Outbox:
        """A rank's process ended."""
        self._dead.add(rank)
        return [] if self._open is None else self._decide(self._open, f"rank {rank} died")

    def boundary(self, iteration: int) -> Outbox:
        """Rank 0 is about to run ``iteration``: undecided by now is too late."""
        opened = self._open
        if opened is None or opened.iteration is None or iteration < opened.iteration:
            return []
        return self._decide(opened, f"undecided at iteration {opened.iteration}")

    def _proposed(self, opened: _Open, message: Propose, now_s: float) -> Outbox:
        if message.iteration is None:
            return self._decide(opened, f"rank {message.rank} refused: {message.why}")
        opened.proposed.setdefault(message.rank, message.iteration)
        if opened.iteration is not None or len(opened.proposed) < self._ranks:
            return []
        opened.iteration = max(opened.proposed.values()) + self._limits.margin_iterations
        opened.give_up_s = now_s + self._limits.silence_s_max
        return self._outstanding(opened)

    def _outstanding(self, opened: _Open) -> Outbox:
        message: Message
        if opened.iteration is None:
            message = Ask(opened.attempt, opened.generation)
        else:
            message = Announce(opened.attempt, opened.iteration)
        return [(rank, message) for rank in range(self._ranks) if rank not in opened.answered]

    def _decide(self, opened: _Open, why: str) -> Outbox:
        commit = not why
        self._open = None
        if commit:
            self._committed = opened.attempt
        decision = Decision(opened.attempt, commit, why)
        return [(rank, decision) for rank in range(self._ranks)]

    def _tell(self, query: Query) -> Outbox:
        attempt = query.attempt
        if attempt.group != self._group or (self._open is not None and attempt == self._open.attempt):
            return []
        commit = attempt == self._committed
        return [(query.rank, Decision(attempt, commit, "" if commit else "aborted"))]


@dataclass(slots=True)
class _Open:
    """The attempt under way, as the coordinator sees it."""

    attempt: Attempt
    generation: int
    give_up_s: float
    resend_s: float
    iteration: int | None = None
    proposed: dict[int, int] = field(default_factory=dict)
    confirmed: set[int] = field(default_factory=set)

    @property
    def answered(self) -> Mapping[int, object] | set[int]:
        """Ranks that answered the present question."""
        return self.proposed if self.iteration is None else self.confirmed


@dataclass(slots=True)
class _Bound:
    """The attempt that a rank takes part in: proposed, or confirmed for ``iteration``."""

    attempt: Attempt
    proposal: Propose
    iteration: int | None = None
    decision: Decision | None = None


class Rank:
    """One rank's half; told of every boundary before the iteration that follows it.

    Args:
        rank: its number.
        ranks: size of the group.
        group: incarnation of the group; a restarted rank joins a new one.
        earliest: for a generation, the first iteration that could run on it, or a string that says why not.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        group: int,
        earliest: Callable[[int], int | str],
        limits: AgreementLimits | None = None,
    ) -> None:
        self._rank = rank
        self._peers = [peer for peer in range(ranks) if peer != rank]
        self._group = group
        self._earliest = earliest
        self._limits = AgreementLimits() if limits is None else limits
        self._next_iteration = 0
        self._bound: _Bound | None = None
        self._last: Decision | None = None
        self._query_s = 0.0

    @property
    def in_doubt(self) -> bool:
        """True while it has confirmed and not heard the decision: only an answer, or a restart, ends that."""
        return self._bound is not None and self._bound.iteration is not None and self._bound.decision is None

    def receive(self, message: Message) -> Outbox:
        """Take a question, an announcement, a decision or another rank's query."""
        if message.attempt.group != self._group:
            return []
        match message:
            case Ask():
                return [(COORDINATOR, self._propose(message))]
            case Announce():
                return [(COORDINATOR, self._confirm(message))]
            case Decision():
                self._learn(message)
            case Query() if self._last is not None and self._last.attempt == message.attempt:
                return [(message.rank, self._last)]
        return []

    def boundary(self, iteration: int, now_s: float) -> tuple[Step, Outbox]:
        """Before ``iteration``; asked again until the answer is not HOLD."""
        bound = self._bound
        if bound is not None and bound.iteration is not None and iteration >= bound.iteration:
            assert iteration == bound.iteration, "a bound rank passed its boundary"
            if bound.decision is None:
                return Step.HOLD, self._ask_around(bound.attempt, now_s)
            self._bound = None
            self._next_iteration = iteration + 1
            return (Step.EXCHANGE if bound.decision.commit else Step.PASS), []
        self._next_iteration = iteration + 1
        return Step.PASS, []

    def _propose(self, ask: Ask) -> Propose:
        bound = self._bound
        if bound is not None and bound.attempt == ask.attempt:
            return bound.proposal
        if self._last is not None and ask.attempt.serial <= self._last.attempt.serial:
            return Propose(ask.attempt, self._rank, None, "already decided")
        if bound is not None and (bound.iteration is not None or bound.attempt.serial > ask.attempt.serial):
            return Propose(ask.attempt, self._rank, None, f"bound by attempt {bound.attempt.serial}")
        earliest = self._earliest(ask.generation)
        if isinstance(earliest, str):
            return Propose(ask.attempt, self._rank, None, earliest)
        proposal = Propose(ask.attempt, self._rank, max(earliest, self._next_iteration))
        self._bound = _Bound(ask.attempt, proposal)
        return proposal

    def _confirm(self, announce: Announce) -> Confirm:
        bound = self._bound
        if bound is None or bound.attempt != announce.attempt or announce.iteration < self._next_iteration:
            # Never proposed in this life, decided already, or past it.
            return Confirm(announce.attempt, self._rank, yes=False)
        bound.iteration = announce.iteration
        return Confirm(announce.attempt, self._rank, yes=True)

    def _learn(self, decision: Decision) -> None:
        bound = self._bound
        if bound is None or bound.attempt != decision.attempt or bound.decision is not None:
            return
        assert bound.iteration is not None or not decision.commit, "a commit needs this rank's confirmation"
        self._last = decision
        if decision.commit:
            bound.decision = decision
        else:
            self._bound = None

    def _ask_around(self, attempt: Attempt, now_s: float) -> Outbox:
        if now_s < self._query_s:
            return []
        self._query_s = now_s + self._limits.resend_s
        targets = {COORDINATOR, *self._peers}
        return [(peer, Query(attempt, self._rank)) for peer in sorted(targets)]
