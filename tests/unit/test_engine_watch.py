"""What the watch makes of a step: evidence for probation, and a signal to reclaim."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.governor import Memory
from engine.loop import ServeLoop
from engine.probation import Breach
from engine.reclaim import LOOK_STEPS, ReclaimPolicy
from engine.schedule import Limits
from engine.servable import StepFacts, WayBack
from engine.simulated import BLOCKS, VOCAB, SimDevice, SimGeneration, SimGraphs, SimPool
from engine.watch import StepWatch


@dataclass
class Watched:
    """A watch on a loop that serves generation 2; its turns take the calls that the watch left."""

    memory: Memory = field(default_factory=lambda: Memory(0, 1000))
    breaches: list[Breach] = field(default_factory=list)
    loop: ServeLoop = field(default_factory=ServeLoop)

    def __post_init__(self) -> None:
        generation = SimGeneration(2, 1, SimPool(), SimGraphs(2), Limits(2, 8, VOCAB), SimDevice())
        self.loop.activate(generation)
        self.loop.turn()
        self.watch = StepWatch(
            self.loop,
            read_memory=lambda: self.memory,
            blocks_for=lambda size_bytes: size_bytes // 10,
            breached=self.breaches.append,
            fallback=self.fallback,
        )

    def fallback(self, generation: int, why: str) -> WayBack | None:
        raise AssertionError(generation, why)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_the_step_before_an_exchange_says_nothing_about_the_new_generation(watched: Watched) -> None:
    watched.watch.probation.begin()
    watched.watch.stepped(StepFacts(1, 20.0, 4, chunk=False, nonfinite=3))
    assert watched.breaches == []
    watched.watch.stepped(StepFacts(2, 20.0, 4, chunk=False, nonfinite=1))
    assert [breach.rule for breach in watched.breaches] == ["nonfinite_output"]


def test_a_breach_is_told_until_probation_ends(watched: Watched) -> None:
    watched.watch.probation.begin()
    for nonfinite in (1, 0, 0):
        watched.watch.stepped(StepFacts(2, 20.0, 4, chunk=False, nonfinite=nonfinite))
    assert len(watched.breaches) == 3, "an exchange back that was missed has to be asked for again"
    watched.watch.probation.end(committed=False)
    watched.watch.stepped(StepFacts(2, 20.0, 4, chunk=False, nonfinite=0))
    assert len(watched.breaches) == 3


def test_requests_that_fail_are_counted_from_the_loops_own_figures(watched: Watched) -> None:
    watched.loop.metrics.requests_failed, watched.loop.metrics.requests_completed = 50, 300
    watched.watch.stepped(StepFacts(2, 20.0, 4, chunk=False, nonfinite=0))
    watched.watch.probation.begin()
    watched.loop.metrics.requests_completed += 30
    watched.watch.stepped(StepFacts(2, 20.0, 4, chunk=False, nonfinite=0))
    assert watched.breaches == []


def test_freeing_is_signalled_by_a_step_and_happens_at_the_boundary(watched: Watched) -> None:
    watched.watch.reclaim.configure(ReclaimPolicy("threshold"))
    watched.memory = Memory(900, 1000)
    for _ in range(3 * LOOK_STEPS):
        watched.watch.stepped(StepFacts(2, 20.0, 4, chunk=False, nonfinite=0))
    assert watched.watch.reclaim.runs == 0, "not in the step"
    watched.loop.turn()
    # One run: nothing more is asked for while one is under way. The pool's free blocks are what it gave back.
    assert (watched.watch.reclaim.runs, watched.watch.reclaim.freed_bytes) == (1, BLOCKS)
