"""The swap machine: which generations exist, which one serves, what may happen next. Pure.

At most two generations are resident and at most one is ACTIVE. READY means resident, warmed and
verified: a staged generation waiting for its swap, and equally the old generation after one, which is
why rollback is the same exchange backwards.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.errors import SwapRefusedError

# Old, new: a third set of weights and KV does not fit the memory budget.
RESIDENT_MAX = 2
# Ended generations kept for `status`, newest last.
ENDED_KEPT = 8


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
    CAPTURED = "captured"
    VERIFIED = "verified"
    EXCHANGED_IN = "exchanged_in"
    EXCHANGED_OUT = "exchanged_out"
    RELEASED = "released"
    FREED = "freed"
    FAILED = "failed"


# fmt: off
TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.LOADING,   Event.LOADED):        State.CAPTURING,
    (State.LOADING,   Event.FAILED):        State.FAILED,
    (State.CAPTURING, Event.CAPTURED):      State.VERIFYING,
    (State.CAPTURING, Event.FAILED):        State.FAILED,
    (State.VERIFYING, Event.VERIFIED):      State.READY,
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


@dataclass(slots=True)
class SwapMachine:
    """States of all generations.

    Attributes:
        states: generation number → state; ended ones are kept for a while.
        active: the generation that serves, or None before the first one.
        committed: the generation that a rollback returns to.
        pending: the generation that waits for its step boundary, or None.
    """

    states: dict[int, State]
    active: int | None = None
    committed: int | None = None
    pending: int | None = None

    @classmethod
    def empty(cls) -> SwapMachine:
        """Nothing staged yet."""
        return cls(states={})

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

    def begin(self, number: int) -> None:
        """Start staging ``number``; the number of an ended generation may be used again.

        Raises:
            SwapRefusedError: ``generation_exists``, or ``resident_full`` with two generations resident.
        """
        if number in self.resident:
            raise SwapRefusedError("generation_exists", f"generation {number} is {self.states[number]}")
        if len(self.resident) >= RESIDENT_MAX:
            raise SwapRefusedError("resident_full", f"generations {self.resident} are resident, release one first")
        self.states.pop(number, None)
        self.states[number] = State.LOADING

    def apply(self, number: int, event: Event) -> State:
        """Move one generation along :data:`TRANSITIONS`; returns its new state.

        Raises:
            SwapRefusedError: ``illegal_transition``.
        """
        state = self.states.get(number)
        target = None if state is None else TRANSITIONS.get((state, event))
        if target is None:
            raise SwapRefusedError("illegal_transition", f"generation {number} is {state}, cannot be {event}")
        self.states[number] = target
        if target in ENDED:
            self._forget_old()
        return target

    def activate_first(self, number: int) -> None:
        """Make the first READY generation serve, committed at once: there is nothing to roll back to."""
        assert self.active is None
        self.apply(number, Event.EXCHANGED_IN)
        self.active = self.committed = number

    def request(self, number: int) -> None:
        """Ask for ``number`` to be exchanged in.

        Raises:
            SwapRefusedError: ``swap_pending``, ``already_active`` or ``not_ready``.
        """
        if self.pending is not None:
            raise SwapRefusedError("swap_pending", f"the swap to generation {self.pending} is still pending")
        if number == self.active:
            raise SwapRefusedError("already_active", f"generation {number} serves already")
        if self.states.get(number) is not State.READY or self.active is None:
            raise SwapRefusedError("not_ready", f"generation {number} is {self.states.get(number, 'unknown')}")
        self.pending = number

    def exchange(self) -> None:
        """The pending generation took over."""
        assert self.active is not None
        assert self.pending is not None
        self.apply(self.active, Event.EXCHANGED_OUT)
        self.apply(self.pending, Event.EXCHANGED_IN)
        self.active, self.pending = self.pending, None

    def miss(self) -> None:
        """The boundary did not come in time: the pending generation is merely READY again."""
        assert self.pending is not None
        self.pending = None

    def release(self, number: int) -> None:
        """Start freeing ``number``. Freeing the committed generation commits the one that serves.

        Raises:
            SwapRefusedError: ``generation_in_use`` when it serves or is pending, ``not_ready`` otherwise.
        """
        if number in (self.active, self.pending):
            raise SwapRefusedError("generation_in_use", f"generation {number} serves or is about to")
        if self.states.get(number) is not State.READY:
            raise SwapRefusedError("not_ready", f"generation {number} is {self.states.get(number, 'unknown')}")
        if self.pending is not None:
            raise SwapRefusedError("swap_pending", f"the swap to generation {self.pending} is still pending")
        self.apply(number, Event.RELEASED)
        if number == self.committed:
            self.committed = self.active

    def _forget_old(self) -> None:
        ended = [number for number, state in self.states.items() if state in ENDED]
        for number in ended[:-ENDED_KEPT]:
            del self.states[number]
