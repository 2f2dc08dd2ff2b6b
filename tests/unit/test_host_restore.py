"""What the host does to serve the committed build again: which process it talks to, and which it replaces."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Any

import pytest

from engine.wire import Control, Release, Reply, Stage, Stats, Swap
from patchctl.agent.budget import RESTART_WINDOW_S, RestartBudget
from patchctl.agent.host import EngineHost
from patchctl.agent.processes import Role
from patchctl.errors import PatchctlError

COMMITTED = Stage(1, "folder", "digest")


class Process:
    """Answers as a front or an engine would; ``refuse`` has the codes of refusals to come, by message type."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.asked: list[Control] = []
        self.refuse: dict[type, list[str]] = {}
        self.active = 1
        self.held = {1}
        self.falls_back = False
        self.nonfinite_rows = 0

    def call(self, message: Control, _timeout_s: float = 0.0) -> Reply:
        self.asked.append(message)
        if codes := self.refuse.get(type(message)):
            code = codes.pop(0)
            raise PatchctlError(code=f"{self.role}.{code}", what="refused", why=f"it says {code}")
        if isinstance(message, Swap):
            self.active = 1 if self.falls_back else message.generation
        return Reply(data=self.stats() if isinstance(message, Stats) else {"mode": "carry"})

    def stats(self) -> dict[str, Any]:
        return {
            "engine_up": True,
            "active_generation": self.active,
            "nonfinite_rows": self.nonfinite_rows,
            "paths": [{"generation": number} for number in sorted(self.held)],
        }


class Pair:
    """Stands in for the processes."""

    def __init__(self) -> None:
        self.now: dict[Role, Process] = {"front": Process("front"), "engine": Process("engine")}
        self.gone: dict[Role, str] = {}
        self.replaced: list[tuple[Role, ...]] = []
        self.attached = 0
        self.starts = {"front": 1, "engine": 1}
        self.pids: dict[str, int] = {}

    def lost(self) -> dict[Role, str]:
        return dict(self.gone)

    def link(self, role: Role) -> Process:
        return self.now[role]

    def replace(self, roles: Collection[Role], _build: Stage) -> None:
        self.replaced.append(tuple(roles))
        self.now |= {role: Process(role) for role in roles}
        self.gone = {}

    def attach(self) -> None:
        self.attached += 1
        self.now["front"].active = self.now["engine"].active


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture
def host(pair: Pair) -> EngineHost:
    with socket.socket() as listen:
        made = EngineHost(listen, restarts_max=2)
    made.processes = pair  # type: ignore[assignment]
    made.active_generation = 1
    return made


def on_probation(host: EngineHost, pair: Pair) -> None:
    host.active_generation = 2
    for process in pair.now.values():
        process.active = 2
        process.held = {1, 2}


def test_an_engine_that_stages_is_not_asked_when_only_the_front_died(host: EngineHost, pair: Pair) -> None:
    pair.gone = {"front": "killed by signal 9"}
    restored = host.restore(lambda: COMMITTED)
    assert (pair.replaced, pair.attached) == ([("front",)], 1)
    assert pair.now["engine"].asked == []
    assert dict(restored.replaced) == {"front": "killed by signal 9"}


def test_a_lost_engine_takes_its_generation_with_it(host: EngineHost, pair: Pair) -> None:
    on_probation(host, pair)
    pair.gone = {"engine": "killed by signal 9"}
    host.restore(lambda: COMMITTED)
    assert (pair.replaced, pair.attached) == ([("engine",)], 1)
    assert pair.now["front"].asked[0] == COMMITTED, "the front must hold it before the new engine announces it"
    assert pair.now["front"].asked[-1] == Release(2)
    assert host.active_generation == 1


def test_a_front_that_died_on_probation_takes_the_engine_back_too(host: EngineHost, pair: Pair) -> None:
    on_probation(host, pair)
    pair.gone = {"front": "killed by signal 9"}
    restored = host.restore(lambda: COMMITTED)
    assert pair.replaced == [("front",)]
    assert pair.now["engine"].active == 1
    assert restored.exchange == {"mode": "carry"}


@pytest.mark.parametrize("code", ["breached", "not_ready", "boundary_missed", "internal"])
def test_an_engine_that_cannot_go_back_is_replaced(host: EngineHost, pair: Pair, code: str) -> None:
    on_probation(host, pair)
    front = pair.now["front"]
    pair.now["engine"].refuse = {Swap: [code]}
    restored = host.restore(lambda: COMMITTED)
    assert pair.replaced == [("engine",)]
    assert pair.now["front"] is front
    assert dict(restored.replaced) == {"engine": f"it says {code}"}


def test_after_the_exchange_back_the_generation_is_made_what_was_committed(host: EngineHost, pair: Pair) -> None:
    on_probation(host, pair)
    pair.now["front"].active = 1  # it follows what the engine says
    asked: list[int] = []

    def repair(generation: int) -> tuple[str, ...]:
        asked.append(generation)
        assert pair.now["engine"].active == 1, "first line first: it serves already"
        return ("w",)

    restored = host.restore(lambda: COMMITTED, repair=repair)
    assert (asked, restored.repaired, pair.replaced) == ([1], ("w",), [])
    host.restore(lambda: COMMITTED, repair=repair)
    assert asked == [1], "nothing was exchanged"


def test_an_exchange_back_that_fails_is_tried_again_once_stored_tensors_are_back(host: EngineHost, pair: Pair) -> None:
    on_probation(host, pair)
    pair.now["front"].active = 1  # it follows what the engine says
    pair.now["engine"].refuse = {Swap: ["not_ready"]}
    restored = host.restore(lambda: COMMITTED, repair=lambda _: ("w",))
    assert (restored.repaired, restored.exchange, pair.replaced) == (("w",), {"mode": "carry"}, [])


@pytest.mark.parametrize("codes", [[], ["not_ready"], ["not_ready", "not_ready"]])
def test_when_the_second_line_fails_too_the_engine_is_replaced(host: EngineHost, pair: Pair, codes: list[str]) -> None:
    on_probation(host, pair)
    pair.now["engine"].refuse = {Swap: codes}

    def repair(_generation: int) -> tuple[str, ...]:
        if len(codes) == 1:
            return ("w",)  # and the exchange fails once more
        raise PatchctlError(code="restore.no_snapshot", what="not put back", why="no snapshot is stored")

    restored = host.restore(lambda: COMMITTED, repair=repair)
    assert pair.replaced == [("engine",)]
    assert list(restored.replaced) == ["engine"]


def test_an_engine_that_goes_back_by_itself_is_let(host: EngineHost, pair: Pair) -> None:
    on_probation(host, pair)
    pair.now["engine"].refuse = {Swap: ["swap_pending", "swap_pending", "already_active"]}
    pair.now["front"].active = 1
    assert host.restore(lambda: COMMITTED).exchange == {}
    assert pair.replaced == []


def test_rows_that_an_earlier_generation_spoiled_are_not_held_against_the_present_one(
    host: EngineHost, pair: Pair
) -> None:
    pair.now["engine"].nonfinite_rows = 2
    assert host.nonfinite_rows() == 2
    on_probation(host, pair)
    pair.now["front"].active = 1  # it follows what the engine says
    host.restore(lambda: COMMITTED)
    assert host.nonfinite_rows() == 0
    pair.now["engine"].nonfinite_rows = 3
    assert host.nonfinite_rows() == 1
    pair.gone = {"engine": "killed by signal 9"}
    host.restore(lambda: COMMITTED)
    assert host.nonfinite_rows() == 0


def test_a_front_that_cannot_hold_the_committed_build_is_replaced(host: EngineHost, pair: Pair) -> None:
    pair.now["front"].refuse = {Stage: ["generation_limit"]}
    host.restore(lambda: COMMITTED)
    assert pair.replaced == [("front",)]


def test_when_the_outcome_of_an_exchange_is_unknown_the_engine_is_asked(host: EngineHost, pair: Pair) -> None:
    pair.now["front"].held = {1, 2}
    pair.now["engine"].refuse = {Swap: ["process_gone"]}
    with pytest.raises(PatchctlError):
        host.swap(2)
    pair.now["engine"].active = 2
    host.restore(lambda: COMMITTED)
    assert pair.now["engine"].active == 1


def test_a_swap_is_not_asked_for_when_the_front_does_not_hold_it(host: EngineHost, pair: Pair) -> None:
    with pytest.raises(PatchctlError) as refused:
        host.swap(2)
    assert refused.value.code == "front.did_not_follow"
    assert pair.now["engine"].asked == []


def test_a_swap_to_what_serves_already_is_done(host: EngineHost, pair: Pair) -> None:
    pair.now["engine"].refuse = {Swap: ["already_active"]}
    assert host.swap(1) == {}


def test_an_engine_that_goes_back_at_once_does_not_leave_the_host_waiting(host: EngineHost, pair: Pair) -> None:
    pair.now["front"].held = {1, 2}
    pair.now["engine"].falls_back = True
    assert host.swap(2) == {"mode": "carry"}
    host.restore(lambda: COMMITTED)
    assert host.active_generation == 1
    assert Swap in {type(message) for message in pair.now["engine"].asked[2:]}, "it is asked what it serves"


def test_an_engine_that_refuses_a_build_leaves_none_in_the_front(host: EngineHost, pair: Pair, tmp_path: Any) -> None:
    pair.now["engine"].refuse = {Stage: ["stage_failed"]}
    with pytest.raises(PatchctlError) as refused:
        host.stage(2, tmp_path, "digest")
    assert refused.value.code == "engine.stage_failed"
    assert pair.now["front"].asked[-1] == Release(2)


def test_a_host_whose_processes_keep_dying_gives_up(host: EngineHost, pair: Pair) -> None:
    for _ in range(2):
        pair.gone = {"engine": "ended with status 1"}
        host.restore(lambda: COMMITTED)
    pair.gone = {"engine": "ended with status 1"}
    with pytest.raises(PatchctlError) as gave_up:
        host.restore(lambda: COMMITTED)
    assert gave_up.value.code == "host.cannot_serve"
    assert "engine: ended with status 1" in gave_up.value.why


def test_the_budget_is_a_sliding_window() -> None:
    budget = RestartBudget(2)
    assert [budget.spend(now_s) for now_s in (0.0, 1.0, 2.0)] == [True, True, False]
    assert not budget.spend(RESTART_WINDOW_S - 0.1)
    assert budget.spend(RESTART_WINDOW_S)
    assert not budget.spend(RESTART_WINDOW_S + 0.5)
    assert budget.spend(RESTART_WINDOW_S + 1.0)
