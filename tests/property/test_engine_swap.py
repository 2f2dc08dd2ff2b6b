"""The swap machine under random commands, legal and not: its invariants hold, refusals change nothing."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import SwapRefusedError
from engine.swap import ENDED, ENDED_KEPT, RESIDENT_MAX, TRANSITIONS, Event, HostState, State, SwapMachine

NUMBERS = st.integers(1, 4)
COMMANDS = st.one_of(
    st.tuples(st.sampled_from(["begin", "request", "release"]), NUMBERS),
    st.tuples(st.sampled_from(["stage", "free", "fail"]), NUMBERS),
    st.tuples(st.sampled_from(["exchange", "miss"]), st.just(0)),
)
STAGING = {State.LOADING: Event.LOADED, State.CAPTURING: Event.CAPTURED, State.VERIFYING: Event.VERIFIED}


def command(machine: SwapMachine, name: str, number: int) -> None:
    state = machine.states.get(number)
    if name in ("begin", "request", "release"):
        getattr(machine, name)(number)
    elif name == "stage" and state in STAGING:
        if machine.apply(number, STAGING[state]) is State.READY and machine.active is None:
            machine.activate_first(number)
    elif name == "free":
        machine.apply(number, Event.FREED)
    elif name == "fail" and state in STAGING:
        machine.apply(number, Event.FAILED)
    elif name in ("exchange", "miss") and machine.pending is not None:
        getattr(machine, name)()


def check(machine: SwapMachine) -> None:
    states = list(machine.states.values())
    active = [number for number, state in machine.states.items() if state is State.ACTIVE]
    assert active == ([] if machine.active is None else [machine.active])
    assert len(machine.resident) <= RESIDENT_MAX
    assert sum(state in ENDED for state in states) <= ENDED_KEPT
    if machine.pending is not None:
        assert machine.states[machine.pending] is State.READY
        assert machine.host is HostState.SWAP_PENDING
    if machine.committed is not None:
        # A rollback target is always there: the committed generation is resident until another is committed.
        assert machine.states[machine.committed] in (State.READY, State.ACTIVE)
    if machine.host is HostState.ACTIVE:
        assert machine.active != machine.committed


@settings(max_examples=300, deadline=None)
@given(st.lists(COMMANDS, max_size=60))
def test_no_sequence_of_commands_breaks_the_machine(commands: list[tuple[str, int]]) -> None:
    machine = SwapMachine.empty()
    for name, number in commands:
        before = copy.deepcopy(machine)
        try:
            command(machine, name, number)
        except SwapRefusedError:
            assert machine == before, "a refusal must change nothing"
        for changed, state in machine.states.items():
            old = before.states.get(changed)
            if old is not None and old != state and not (old in ENDED and state is State.LOADING):
                reached = {target for (source, _), target in TRANSITIONS.items() if source is old}
                if before.active is None and State.READY in reached:
                    reached.add(State.ACTIVE)  # the first generation serves as soon as it is READY
                assert state in reached
        check(machine)


def staged(*numbers: int) -> SwapMachine:
    machine = SwapMachine.empty()
    for number in numbers:
        machine.begin(number)
        for event in (Event.LOADED, Event.CAPTURED, Event.VERIFIED):
            machine.apply(number, event)
        if machine.active is None:
            machine.activate_first(number)
    return machine


def test_swap_commit_and_rollback() -> None:
    machine = staged(1, 2)
    hosts = [machine.host]

    def swap(number: int) -> None:
        machine.request(number)
        hosts.append(machine.host)
        machine.exchange()
        hosts.append(machine.host)
        assert machine.active == number

    swap(2)
    swap(1)
    swap(2)
    machine.release(1)
    machine.apply(1, Event.FREED)
    hosts.append(machine.host)
    assert hosts == [
        "STANDBY",
        "SWAP_PENDING",
        "ACTIVE",
        "SWAP_PENDING",
        "STANDBY",
        "SWAP_PENDING",
        "ACTIVE",
        "STANDBY",
    ]
    assert machine.committed == 2


def test_refusals_have_stable_codes() -> None:
    def code(name: str, number: int) -> str:
        with pytest.raises(SwapRefusedError) as refused:
            getattr(machine, name)(number)
        return refused.value.code

    machine = staged(1, 2)
    assert code("begin", 3) == "resident_full"
    assert code("begin", 2) == "generation_exists"
    assert code("request", 1) == "already_active"
    assert code("request", 9) == "not_ready"
    assert code("release", 1) == "generation_in_use"
    machine.request(2)
    assert code("request", 2) == "swap_pending"
    assert code("release", 2) == "generation_in_use"


def test_every_state_but_the_ended_can_fail() -> None:
    sources = {source for source, event in TRANSITIONS if event is Event.FAILED}
    assert sources == set(State) - ENDED
