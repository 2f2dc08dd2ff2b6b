"""Memory samples of two processes never meet in one ring."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from patchctl.agent.watch import MemoryWatch
from patchctl.errors import PatchctlError


class Host:
    """Both roles are this very process, under pids of the test's choosing where nothing is sampled."""

    def __init__(self) -> None:
        self.pids = {"front": os.getpid(), "engine": os.getpid()}
        self.processes = SimpleNamespace(pids=self.pids)
        self.down = False

    def front_stats(self) -> dict[str, Any]:
        if self.down:
            raise PatchctlError("host.process_gone", "gone", "killed")
        return {"requests_completed": 1, "tokens_out": 1}


def sizes(watch: MemoryWatch) -> dict[str, int]:
    return {role: len(samples) for role, samples in watch.between(0, float("inf")).items()}


@pytest.fixture
def watched() -> tuple[Host, MemoryWatch]:
    host = Host()
    watch = MemoryWatch(host, 0.1)  # type: ignore[arg-type]
    for _ in range(3):
        watch.look()
    assert sizes(watch) == {"front": 3, "engine": 3}
    return host, watch


def test_a_new_engine_empties_its_own_ring(watched: tuple[Host, MemoryWatch]) -> None:
    host, watch = watched
    del host.pids["engine"]
    watch.look()
    assert sizes(watch) == {"front": 4, "engine": 3}
    host.pids["engine"] = os.getppid()
    watch.look()
    assert sizes(watch)["front"] == 5
    assert sizes(watch)["engine"] <= 1


def test_a_new_front_empties_both(watched: tuple[Host, MemoryWatch]) -> None:
    host, watch = watched
    host.down = True
    watch.look()
    host.down = False
    host.pids["front"] = os.getppid()
    watch.look()
    assert sizes(watch)["engine"] == 1
    assert sizes(watch)["front"] <= 1


def test_a_process_that_is_gone_costs_the_other_no_sample(watched: tuple[Host, MemoryWatch]) -> None:
    host, watch = watched
    host.pids["engine"] = 2**22 + 1  # above the kernel's largest pid
    watch.look()
    assert sizes(watch) == {"front": 4, "engine": 0}
