"""The swap machine under random commands, legal and not: its invariants hold, refusals change nothing."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import SwapRefusedError
from engine.swap import ENDED, ENDED_KEPT, RESIDENT_MAX, STAGING, TRANSITIONS, Event, HostState, State, SwapMachine

NUMBERS = st.integers(1, 4)
BUCKETS = (1, 2)
COMMANDS = st.one_of(
    st.tuples(st.sampled_from(["begin", "begin_copy", "request", "release"]), NUMBERS),
    st.tuples(st.sampled_from(["stage", "stage", "warm", "free", "fail"]), NUMBERS),
    st.tuples(st.sampled_from(["exchange", "miss", "breach", "fall_back", "crash"]), st.just(0)),
)
NEXT = {State.LOADING: Event.LOADED, State.CAPTURING: Event.CAPTURED, State.VERIFYING: Event.VERIFIED}


def command(machine: SwapMachine, name: str, number: int) -> None:
    state = machine.states.get(number)
    if name in ("begin", "request", "release", "fail"):
        getattr(machine, name)(number)
    elif name == "begin_copy":
        machine.begin(number, "copy")
    elif name == "stage" and state in NEXT:
        if machine.apply(number, NEXT[state], BUCKETS) is State.READY and machine.active is None:
            machine.activate_first(number)
    elif name == "warm":
        machine.apply(number, Event.WARMED, BUCKETS)
    elif name == "free":
        machine.apply(number, Event.FREED)
    elif name in ("exchange", "miss") and machine.pending is not None:
        getattr(machine, name)()
    elif name == "breach":
        machine.breach("a reason")
    elif name == "fall_back" and machine.rollback_target is not None:
        machine.fall_back()
    elif name == "crash":
        machine.crash()


def check(machine: SwapMachine) -> None:
    states = list(machine.states.values())
    active = [number for number, state in machine.states.items() if state is State.ACTIVE]
    assert active == ([] if machine.active is None else [machine.active])
    assert len(machine.resident) <= RESIDENT_MAX
    assert sum(state in ENDED for state in states) <= ENDED_KEPT
    assert set(machine.commit_modes) == set(machine.resident)
    assert set(machine.cold) <= {number for number, state in machine.states.items() if state in STAGING}
    assert set(machine.breached) <= set(machine.resident)
    assert machine.committed not in machine.breached
    if machine.pending is not None:
        assert machine.states[machine.pending] is State.READY
        assert machine.pending not in machine.breached
        assert machine.host is HostState.SWAP_PENDING
    if machine.committed is not None:
        # A rollback target is always there: the committed generation is resident until another is committed.
        assert machine.states[machine.committed] in (State.READY, State.ACTIVE)
    if machine.host is HostState.ACTIVE:
        assert machine.active != machine.committed


def reachable(old: State) -> set[State]:
    """Where one command can take a generation."""
    reached = {target for (source, _), target in TRANSITIONS.items() if source is old}
    if State.READY in reached and old in STAGING:
        reached.add(State.ACTIVE)  # the first generation serves as soon as it is READY
    return reached


@settings(max_examples=400, deadline=None)
@given(st.lists(COMMANDS, max_size=80))
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
                assert state in reachable(old)
            if state is State.READY and old is State.VERIFYING:
                assert not before.cold[changed], "READY without every bucket warmed"
        check(machine)


def staged(*numbers: int) -> SwapMachine:
    machine = SwapMachine.empty()
    for number in numbers:
        machine.begin(number)
        for event in (Event.LOADED, Event.WARMED, Event.CAPTURED, Event.VERIFIED):
            machine.apply(number, event, BUCKETS)
        if machine.active is None:
            machine.activate_first(number)
    return machine


def swapped(*numbers: int) -> SwapMachine:
    """The second of ``numbers`` serves on probation."""
    machine = staged(*numbers)
    machine.request(numbers[1])
    machine.exchange()
    return machine


def refused(machine: SwapMachine, name: str, *arguments: object) -> str:
    with pytest.raises(SwapRefusedError) as error:
        getattr(machine, name)(*arguments)
    return error.value.code


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
    machine = staged(1, 2)
    assert refused(machine, "begin", 3) == "resident_full"
    assert refused(machine, "begin", 2) == "generation_exists"
    assert refused(machine, "request", 1) == "already_active"
    assert refused(machine, "request", 9) == "not_ready"
    assert refused(machine, "release", 1) == "generation_in_use"
    assert refused(machine, "fail", 9) == "illegal_transition"
    assert refused(machine, "apply", 2, Event.EXCHANGED_IN) == "illegal_transition"
    assert refused(machine, "choose_mode", 2, "copy") == "illegal_transition"
    machine.request(2)
    assert refused(machine, "request", 2) == "swap_pending"
    assert refused(machine, "release", 2) == "generation_in_use"


def test_every_state_but_the_ended_can_fail() -> None:
    sources = {source for source, event in TRANSITIONS if event is Event.FAILED}
    assert sources == set(State) - ENDED


def test_every_state_of_staging_can_be_abandoned() -> None:
    assert {source for source, event in TRANSITIONS if event is Event.ABANDONED} == STAGING


def test_an_unwarmed_generation_cannot_become_ready() -> None:
    machine = staged(1)
    machine.begin(2)
    machine.apply(2, Event.LOADED, ["one", "two"])
    machine.apply(2, Event.WARMED, ["one"])
    machine.apply(2, Event.CAPTURED)
    with pytest.raises(SwapRefusedError, match="never warmed for two"):
        machine.apply(2, Event.VERIFIED)
    assert machine.states[2] is State.VERIFYING
    # Too late: warming belongs to capturing.
    assert refused(machine, "apply", 2, Event.WARMED, ["two"]) == "illegal_transition"


def test_a_generation_without_buckets_is_not_vacuously_warm() -> None:
    machine = SwapMachine.empty()
    machine.begin(1)
    assert refused(machine, "apply", 1, Event.LOADED) == "not_warmed"


def test_releasing_a_generation_that_is_being_staged_abandons_it() -> None:
    machine = staged(1)
    machine.begin(2)
    assert machine.release(2) is State.LOADING
    # It is resident until the stager let go of its memory.
    assert machine.resident == [1, 2]
    assert refused(machine, "apply", 2, Event.LOADED, BUCKETS) == "illegal_transition"
    machine.apply(2, Event.FREED)
    assert (machine.resident, machine.active, machine.committed) == ([1], 1, 1)


def test_a_copy_needs_a_serving_generation() -> None:
    machine = SwapMachine.empty()
    assert refused(machine, "begin", 1, "copy") == "copy_refused"
    machine.begin(1)
    assert refused(machine, "choose_mode", 1, "copy") == "copy_refused"
    machine = staged(1)
    machine.begin(2, "copy")
    machine.choose_mode(2, "exchange")
    machine.choose_mode(2, "copy")
    assert machine.commit_modes == {1: "exchange", 2: "copy"}


def test_a_breached_generation_never_serves_again() -> None:
    machine = swapped(1, 2)
    assert machine.breach("7 rows were not finite") == 1
    machine.request(1)
    machine.exchange()
    assert (machine.host, machine.active, machine.committed) == (HostState.STANDBY, 1, 1)
    with pytest.raises(SwapRefusedError, match="7 rows") as error:
        machine.request(2)
    assert error.value.code == "breached"
    machine.release(2)
    machine.apply(2, Event.FREED)
    assert machine.breached == {}
    # The number may come back as another build.
    machine.begin(2)


def test_a_breached_generation_cannot_be_committed() -> None:
    machine = swapped(1, 2)
    machine.breach("slow")
    assert refused(machine, "release", 1) == "breached"


def test_a_committed_generation_cannot_breach() -> None:
    machine = staged(1, 2)
    assert machine.breach("slow") is None
    assert machine.breached == {}


@pytest.mark.parametrize("pending", [False, True])
def test_a_fallback_ends_on_the_committed_generation(pending: bool) -> None:
    machine = swapped(1, 2)
    if pending:
        machine.request(1)
    machine.fall_back()
    assert (machine.active, machine.pending, machine.host) == (1, None, HostState.STANDBY)
    assert machine.states == {1: State.ACTIVE, 2: State.READY}


def test_failing_on_probation_returns_to_the_committed_generation() -> None:
    machine = swapped(1, 2)
    machine.request(1)
    assert machine.fail(2) == 1
    assert (machine.active, machine.committed, machine.pending) == (1, 1, None)
    assert machine.states == {1: State.ACTIVE, 2: State.FAILED}


def test_failing_alone_leaves_nothing_to_serve() -> None:
    machine = staged(1)
    assert machine.fail(1) is None
    assert (machine.active, machine.committed, machine.resident) == (None, None, [])


def test_a_failed_rollback_target_commits_what_serves() -> None:
    machine = swapped(1, 2)
    machine.breach("slow, but all there is")
    machine.request(1)
    assert machine.fail(1) == 2
    assert machine.breached == {}
    assert (machine.active, machine.committed, machine.pending) == (2, 2, None)


@pytest.mark.parametrize("on_probation", [False, True])
def test_a_crash_ends_everything_but_names_the_committed_generation(on_probation: bool) -> None:
    machine = swapped(1, 2) if on_probation else staged(1, 2)
    assert machine.crash() == 1
    assert (machine.resident, machine.active, machine.host) == ([], None, HostState.STANDBY)
