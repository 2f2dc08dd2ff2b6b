"""When a transaction may commit, and what it says when it may not."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchctl.agent.agent import Agent
from patchctl.agent.deploy import Deploy
from patchctl.agent.ending import Wholeness, check_on_probation, commit, release_after_commit
from patchctl.agent.requests import SwapOptions
from patchctl.errors import ExitCode, PatchctlError
from patchctl.home import Home
from patchctl.transaction.machine import Step
from patchctl.transaction.runner import StepResult


def stats(active: int, breach: str = "") -> dict[str, Any]:
    return {
        "active_generation": active,
        "generations": [{"generation": 1, "breach": ""}, {"generation": 2, "breach": breach}],
    }


class Processes:
    def __init__(self) -> None:
        self.starts = {"front": 1, "engine": 1}
        self.gone: dict[str, str] = {}

    def lost(self) -> dict[str, str]:
        return dict(self.gone)


def context(processes: Processes, active: int = 2) -> tuple[Any, list[int]]:
    committed: list[int] = []
    host = SimpleNamespace(processes=processes, engine_stats=lambda: stats(active), undisturbed=nullcontext)
    journal = SimpleNamespace(commit_generation=lambda number, *_: committed.append(number))
    return SimpleNamespace(host=host, journal=journal), committed


def test_a_generation_that_still_serves_is_on_probation() -> None:
    check_on_probation(stats(2), 2)


@pytest.mark.parametrize(
    ("breach", "why"), [("a step failed: boom", "a step failed: boom"), ("", "the engine serves generation 1 again")]
)
def test_the_engines_reason_is_the_transactions(breach: str, why: str) -> None:
    with pytest.raises(PatchctlError) as refused:
        check_on_probation(stats(1, breach), 2)
    assert (refused.value.code, refused.value.why, refused.value.exit_code) == (
        "bake.breach",
        why,
        ExitCode.ROLLED_BACK,
    )


def test_a_whole_pair_commits() -> None:
    made, committed = context(Processes())
    commit(made, Wholeness(made), 2, "tx", {})
    assert committed == [2]


def test_a_generation_that_went_back_is_not_committed() -> None:
    made, committed = context(Processes(), active=1)
    with pytest.raises(PatchctlError):
        commit(made, Wholeness(made), 2, "tx", {})
    assert committed == []


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_committed_over_a_lost_process(replaced: bool) -> None:
    processes = Processes()
    made, committed = context(processes)
    wholeness = Wholeness(made)
    if replaced:
        processes.starts = {"front": 2, "engine": 1}
    else:
        processes.gone = {"engine": "killed by signal 9"}
    with pytest.raises(PatchctlError) as refused:
        commit(made, wholeness, 2, "tx", {})
    assert refused.value.code == "host.process_lost"
    assert committed == []


def test_what_was_lost_before_staging_does_not_matter() -> None:
    processes = Processes()
    made, _ = context(processes)
    wholeness = Wholeness(made)
    processes.starts = {"front": 2, "engine": 1}
    wholeness.begin()
    wholeness.check()


def test_a_step_fails_when_a_process_is_lost_by_its_end() -> None:
    processes = Processes()
    made, _ = context(processes)

    def step() -> StepResult:
        processes.starts = {"front": 1, "engine": 2}
        return StepResult()

    with pytest.raises(PatchctlError) as refused:
        Wholeness(made).around(step)()
    assert "engine process was lost" in refused.value.why


@pytest.mark.parametrize(
    "step", [Step.SNAPSHOT_BEFORE, Step.SWAP, Step.BAKE, Step.SNAPSHOT_AFTER, Step.VERDICT], ids=str
)
def test_no_step_of_a_deploy_goes_on_over_a_lost_process(step: Step, tmp_path: Path) -> None:
    processes = Processes()
    made, _ = context(processes)
    made.home = Home(tmp_path)
    record: Any = SimpleNamespace(id="tx", op_id="op")
    deploy = Deploy(made, record, SwapOptions())
    processes.starts = {"front": 2, "engine": 1}
    with pytest.raises(PatchctlError) as refused:
        deploy.steps()[step]()
    assert refused.value.code == "host.process_lost"


def test_a_breach_after_the_commit_obeys_the_journal() -> None:
    done: list[str] = []
    refusals = ["front.generation_active"]

    def release(_generation: int) -> None:
        done.append("release")
        if refusals:
            raise PatchctlError(refusals.pop(), "refused", "it serves")

    host = SimpleNamespace(release=release)
    made: Any = SimpleNamespace(host=host, restore=lambda: done.append("restore"))
    assert release_after_commit(made, 1) == ""
    assert done == ["release", "restore", "release"]


class Stopping:
    """A stop flag that ends the supervisor after ``looks`` looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def wait(self, _seconds: float) -> bool:
        self.looks -= 1
        return self.looks < 0

    def is_set(self) -> bool:
        return self.looks < 0


@pytest.mark.parametrize(
    ("codes", "gives_up", "tries"),
    [
        (["host.process_gone", "host.spawn_failed"], False, 5),
        (["host.process_gone", "host.cannot_serve"], True, 2),
        (["engine.stage_failed"], True, 1),
    ],
)
def test_the_supervisor_tries_again_only_where_that_can_help(codes: list[str], gives_up: bool, tries: int) -> None:
    left, tried, told = list(codes), [], []

    def restore() -> Any:
        tried.append(1)
        if left:
            raise PatchctlError(left.pop(0), "it failed", "a reason")
        return SimpleNamespace(replaced={"engine": "killed by signal 9"})

    processes = SimpleNamespace(lost=lambda: {"engine": "killed by signal 9"})
    made: Any = SimpleNamespace(stopping=Stopping(5), host=SimpleNamespace(processes=processes), restore=restore)
    agent = Agent(made, "http://127.0.0.1")
    agent.on_failed = lambda: told.append(1)
    agent._supervise()
    assert (len(tried), bool(told)) == (tries, gives_up)
    assert (agent.failed is not None) == gives_up
    if agent.failed is not None:
        assert (agent.failed.code, agent.failed.why) == ("host.cannot_serve", "a reason")
