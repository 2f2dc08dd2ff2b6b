"""The swap machine: which generations exist, which one serves, what may happen next. Pure.

At most two generations are resident and at most one is ACTIVE. READY means resident, warmed and
verified: a staged generation waiting for its swap, and equally the old generation after one, which is
why rollback is the same exchange backwards. A refusal changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.errors import SwapRefusedError

# Old, new: a third set of weights and KV does not fit the memory budget.
RESIDENT_MAX = 2
# Ended generations kept for `status`, newest last.
ENDED_KEPT = 8

CommitMode = Literal["exchange", "copy"]


class State(enum.StrEnum):
    """Of one generation."""

    LOADING = "LOADING"
    CAPTURING = "CAPTURING"
    VERIFYING = "VERIFYING"
    READY = "READY"
    ACTIVE = "ACTIVE"
    RETIRING = "RETIRING"
    FREED = "FREED"
    FAILED = "FAILED"


class HostState(enum.StrEnum):
    """Of the engine: ACTIVE is a new generation on probation, until it is committed or rolled back."""

    STANDBY = "STANDBY"
    SWAP_PENDING = "SWAP_PENDING"
    ACTIVE = "ACTIVE"


class Event(enum.StrEnum):
    """What happens to one generation."""

    LOADED = "loaded"
    WARMED = "warmed"
    CAPTURED = "captured"
    VERIFIED = "verified"
    ABANDONED = "abandoned"
    EXCHANGED_IN = "exchanged_in"
    EXCHANGED_OUT = "exchanged_out"
    RELEASED = "released"
    FREED = "freed"
    FAILED = "failed"


# fmt: off
TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.LOADING,   Event.LOADED):        State.CAPTURING,
    (State.LOADING,   Event.ABANDONED):     State.RETIRING,
    (State.LOADING,   Event.FAILED):        State.FAILED,
    (State.CAPTURING, Event.WARMED):        State.CAPTURING,
    (State.CAPTURING, Event.CAPTURED):      State.VERIFYING,
    (State.CAPTURING, Event.ABANDONED):     State.RETIRING,
    (State.CAPTURING, Event.FAILED):        State.FAILED,
    (State.VERIFYING, Event.VERIFIED):      State.READY,
    (State.VERIFYING, Event.ABANDONED):     State.RETIRING,
    (State.VERIFYING, Event.FAILED):        State.FAILED,
    (State.READY,     Event.EXCHANGED_IN):  State.ACTIVE,
    (State.READY,     Event.RELEASED):      State.RETIRING,
    (State.READY,     Event.FAILED):        State.FAILED,
    (State.ACTIVE,    Event.EXCHANGED_OUT): State.READY,
    (State.ACTIVE,    Event.FAILED):        State.FAILED,
    (State.RETIRING,  Event.FREED):         State.FREED,
    (State.RETIRING,  Event.FAILED):        State.FAILED,
}
# fmt: on

ENDED = frozenset({State.FREED, State.FAILED})
STAGING = frozenset({State.LOADING, State.CAPTURING, State.VERIFYING})
# Events that also move what serves, waits or is committed: each has a method of its own.
_BY_METHOD = frozenset({Event.ABANDONED, Event.EXCHANGED_IN, Event.EXCHANGED_OUT, Event.RELEASED})


class Report(Protocol):
    """How staging tells what it reached."""

    def __call__(self, event: Event, buckets: Iterable[Hashable] = ()) -> None:
        """See :meth:`SwapMachine.apply`; raises SwapRefusedError when the generation was abandoned."""


@dataclass(slots=True)
class SwapMachine:
    """States of all generations.

    Attributes:
        states: generation number → state; ended ones are kept for a while.
        active: the generation that serves, or None before the first one.
        committed: the generation that a rollback returns to.
        pending: the generation that waits for its step boundary, or None.
        commit_modes: of the resident generations: graphs of its own (``exchange``), or those of the
            generation it was staged beside (``copy``).
        cold: of the generations being captured, the buckets that were not warmed yet.
        breached: resident generations that failed their probation, and why; they never serve again.
    """

    states: dict[int, State] = field(default_factory=dict)
    active: int | None = None
    committed: int | None = None
    pending: int | None = None
    commit_modes: dict[int, CommitMode] = field(default_factory=dict)
    cold: dict[int, frozenset[Hashable]] = field(default_factory=dict)
    breached: dict[int, str] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> SwapMachine:
        """Nothing staged yet."""
        return cls()

    @property
    def host(self) -> HostState:
        """The host state, derived: it cannot contradict the generations."""
        if self.pending is not None:
            return HostState.SWAP_PENDING
        return HostState.STANDBY if self.active == self.committed else HostState.ACTIVE

    @property
    def resident(self) -> list[int]:
        """Generations that hold memory."""
        return [number for number, state in self.states.items() if state not in ENDED]

    @property
    def rollback_target(self) -> int | None:
        """The committed generation while another one serves on probation, else None."""
        return None if self.active == self.committed else self.committed

    def begin(self, number: int, commit_mode: CommitMode = "exchange") -> None:
        """Start staging ``number``; the number of an ended generation may be used again.

        Raises:
            SwapRefusedError: ``generation_exists``, ``resident_full`` with two generations resident, or
                ``copy_refused`` when there is no generation whose graphs a copy could use.
        """
        if number in self.resident:
            raise SwapRefusedError("generation_exists", f"generation {number} is {self.states[number]}")
        if len(self.resident) >= RESIDENT_MAX:
            raise SwapRefusedError("resident_full", f"generations {self.resident} are resident, release one first")
        if commit_mode == "copy" and self.active is None:
            raise SwapRefusedError("copy_refused", "no generation serves whose graphs could be kept")
        self.states.pop(number, None)
        self.states[number] = State.LOADING
        self.commit_modes[number] = commit_mode

    def choose_mode(self, number: int, commit_mode: CommitMode) -> None:
        """Change the commit mode of a generation of which nothing is loaded yet.

        Raises:
            SwapRefusedError: ``illegal_transition`` later than LOADING, ``copy_refused`` as for :meth:`begin`.
        """
        if self.states.get(number) is not State.LOADING:
            raise self._illegal(number, f"get commit mode {commit_mode}")
        if commit_mode == "copy" and self.active is None:
            raise SwapRefusedError("copy_refused", "no generation serves whose graphs could be kept")
        self.commit_modes[number] = commit_mode

    def apply(self, number: int, event: Event, buckets: Iterable[Hashable] = ()) -> State:
        """Move one generation along :data:`TRANSITIONS`; returns its new state.

        Args:
            number: the generation.
            event: what staging or freeing it reached; FAILED is :meth:`fail`.
            buckets: with LOADED all buckets to be captured, with WARMED those that ran once.

        Raises:
            SwapRefusedError: ``illegal_transition``, or ``not_warmed`` for a VERIFIED generation of which
                a bucket never ran: its first step would stall every stream.
        """
        if event is Event.FAILED:
            self.fail(number)
            return State.FAILED
        if event in _BY_METHOD:
            raise self._illegal(number, f"be {event} by itself")
        self._target(number, event)
        named, cold = frozenset(buckets), self.cold.get(number, frozenset())
        if event is Event.LOADED and not named:
            raise SwapRefusedError("not_warmed", f"generation {number} has no bucket")
        if event is Event.VERIFIED and cold:
            missing = ", ".join(sorted(map(str, cold)))
            raise SwapRefusedError("not_warmed", f"generation {number} was never warmed for {missing}")
        if event is Event.LOADED:
            self.cold[number] = named
        elif event is Event.WARMED:
            self.cold[number] = cold - named
        return self._move(number, event)

    def activate_first(self, number: int) -> None:
        """Make the first READY generation serve, committed at once: there is nothing to roll back to."""
        assert self.active is None
        self._move(number, Event.EXCHANGED_IN)
        self.active = self.committed = number

    def request(self, number: int) -> None:
        """Ask for ``number`` to be exchanged in.

        Raises:
            SwapRefusedError: ``swap_pending``, ``already_active``, ``not_ready``, or ``breached`` when it
                failed its probation before.
        """
        if self.pending is not None:
            raise SwapRefusedError("swap_pending", f"the swap to generation {self.pending} is still pending")
        if number == self.active:
            raise SwapRefusedError("already_active", f"generation {number} serves already")
        if self.states.get(number) is not State.READY or self.active is None:
            raise SwapRefusedError("not_ready", f"generation {number} is {self.states.get(number, 'unknown')}")
        if number in self.breached:
            raise SwapRefusedError("breached", f"generation {number} was sent back: {self.breached[number]}")
        self.pending = number

    def exchange(self) -> None:
        """The pending generation took over."""
        assert self.active is not None
        assert self.pending is not None
        self._move(self.active, Event.EXCHANGED_OUT)
        self._move(self.pending, Event.EXCHANGED_IN)
        self.active, self.pending = self.pending, None

    def miss(self) -> None:
        """The boundary did not come in time: the pending generation is merely READY again."""
        assert self.pending is not None
        self.pending = None

    def breach(self, why: str) -> int | None:
        """The serving generation failed its probation: it may not serve again, whatever happens next.

        Returns:
            The committed generation, to exchange back to; None when none is on probation.
        """
        target = self.rollback_target
        if target is not None:
            assert self.active is not None
            self.breached[self.active] = why
        return target

    def fall_back(self) -> None:
        """The committed generation took over from the one on probation at once, without a request.

        A pending swap ends with it: whichever way it went, its outcome is this one.
        """
        target = self.rollback_target
        assert self.active is not None
        assert target is not None
        self.pending = None
        self._move(self.active, Event.EXCHANGED_OUT)
        self._move(target, Event.EXCHANGED_IN)
        self.active = target

    def release(self, number: int) -> State:
        """Start freeing ``number``; returns the state it was in.

        Freeing the committed generation commits the one that serves; freeing one that is still being
        staged abandons that.

        Raises:
            SwapRefusedError: ``generation_in_use`` when it serves or is pending, ``breached`` when that
                would commit a generation that failed its probation, ``not_ready`` otherwise.
        """
        state = self.states.get(number)
        if number in (self.active, self.pending):
            raise SwapRefusedError("generation_in_use", f"generation {number} serves or is about to")
        if state in STAGING:
            self._move(number, Event.ABANDONED)
            return state
        if state is not State.READY:
            raise SwapRefusedError("not_ready", f"generation {number} is {self.states.get(number, 'unknown')}")
        if self.pending is not None:
            raise SwapRefusedError("swap_pending", f"the swap to generation {self.pending} is still pending")
        if number == self.committed and self.active in self.breached:
            raise SwapRefusedError("breached", f"generation {self.active} failed its probation, {number} must stay")
        self._move(number, Event.RELEASED)
        if number == self.committed:
            self.committed = self.active
        return state

    def fail(self, number: int) -> int | None:
        """``number`` cannot be used any more, whatever it did.

        Returns:
            What serves from now on: the committed generation when ``number`` failed on probation; None
            when nothing is left to serve.

        Raises:
            SwapRefusedError: ``illegal_transition`` for a generation that is unknown or has ended.
        """
        self._move(number, Event.FAILED)
        if self.pending == number:
            self.pending = None
        if self.active == number:
            # A pending swap ends with it: its target is the committed generation, which takes over now.
            self.active, self.pending = self.rollback_target, None
            if self.active is not None:
                self._move(self.active, Event.EXCHANGED_IN)
        if self.committed == number:
            # Nothing to go back to: what serves is all there is, whatever was said about it.
            self.committed = self.active
            if self.active is not None:
                self.breached.pop(self.active, None)
        return self.active

    def crash(self) -> int | None:
        """The process ends and all memory with it; returns the generation that a restart has to load."""
        for number in self.resident:
            self._move(number, Event.FAILED)
        committed = self.committed
        self.active = self.committed = self.pending = None
        return committed

    def _move(self, number: int, event: Event) -> State:
        target = self._target(number, event)
        self.states[number] = target
        if target not in STAGING:
            self.cold.pop(number, None)
        if target in ENDED:
            self.commit_modes.pop(number, None)
            self.breached.pop(number, None)
            self._forget_old()
        return target

    def _target(self, number: int, event: Event) -> State:
        state = self.states.get(number)
        target = None if state is None else TRANSITIONS.get((state, event))
        if target is None:
            raise self._illegal(number, f"be {event}")
        return target

    def _illegal(self, number: int, what: str) -> SwapRefusedError:
        state = self.states.get(number, "unknown")
        return SwapRefusedError("illegal_transition", f"generation {number} is {state}, cannot {what}")

    def _forget_old(self) -> None:
        ended = [number for number, state in self.states.items() if state in ENDED]
        for number in ended[:-ENDED_KEPT]:
            del self.states[number]
