"""The real serve loop and swap machine under random events, on generations that check every KV they read.

See :mod:`engine.simulated` for the oracle. Time does not pass: what depends on it (deadlines, launches
under way, slow steps) is an event like the others. A seed replays: run the test with its number.
"""

from __future__ import annotations

import itertools
import math
import random
from concurrent.futures import Future
from typing import Any

import pytest

from engine.errors import SwapRefusedError
from engine.exchange import resolve
from engine.loop import ServeLoop
from engine.pending import PendingSwap
from engine.probation import Probation, Step
from engine.schedule import Limits
from engine.servable import StepFacts, WayBack
from engine.simulated import (
    BLOCK_TOKENS,
    BLOCKS,
    VOCAB,
    InjectedError,
    Inline,
    SimDevice,
    SimFront,
    SimGeneration,
    SimGraphs,
    SimPool,
    SimRequest,
)
from engine.swap import RESIDENT_MAX, Event, State, SwapMachine
from engine.wire import Cancel, Reply, Sampling, Submit

SLOW_STEP_MS = 200.0
BUCKETS = ("decode", "prefill")
STAGES = (Event.LOADED, Event.WARMED, Event.CAPTURED, Event.VERIFIED)
STEMS = ((5, 6, 7, 8, 9, 10, 11, 12, 13), (5, 6, 7, 8, 30, 31, 32, 33), (2,))
EVENTS_PER_SEED = 400
SETTLE_TURNS_MAX = 3000


class Host:
    """Engine process and agent of one simulation; :class:`engine.servable.StepObserver` as the controller is."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation, replayed from its seed
        self.numbers = itertools.count(1)
        self.request_ids = itertools.count(1)
        self.weights: dict[int, int] = {}
        self.replies: list[Future[Reply]] = []
        self.fronts: list[SimFront] = []
        self.exchanges = self.fallbacks = self.crashes = 0
        self.boot(weights=101)

    def boot(self, weights: int) -> None:
        """A fresh process that serves ``weights``."""
        self.machine, self.probation, self.device = SwapMachine.empty(), Probation(), SimDevice()
        self.generations: dict[int, SimGeneration] = {}
        self.progress: dict[int, int] = {}
        self.loop = ServeLoop()
        self.loop._helper.shutdown()
        self.loop._helper = Inline()  # type: ignore[assignment]
        self.loop.observe(self)
        self.pending: PendingSwap | None = None
        number = next(self.numbers)
        self.machine.begin(number)
        self.build(number, weights, copy=False)
        for event in STAGES:
            self.machine.apply(number, event, BUCKETS)
        self.machine.activate_first(number)
        self.loop.activate(self.generations[number])
        self.attach()
        self.loop.turn()

    def build(self, number: int, weights: int, *, copy: bool) -> None:
        active = self.loop.active
        slots, context = self.random.choice(((3, 48), (4, 48), (2, 30)))
        pool, graphs = SimPool(), SimGraphs(number)
        if isinstance(active, SimGeneration) and (copy or self.random.random() < 0.7):
            pool = active.pool
            if copy:
                graphs, slots, context = active.graphs, active.limits.slots, active.limits.context
        self.weights[number] = weights
        self.generations[number] = SimGeneration(
            number, weights, pool, graphs, Limits(slots, context, VOCAB), self.device
        )

    def attach(self) -> None:
        self.fronts.append(SimFront(self.weights))
        # Who posts before is taken for the front before.
        self.attached = self.loop.attach(self.fronts[-1].receive)

    @property
    def front(self) -> SimFront:
        return self.fronts[-1]

    # The observer, as the controller does it.

    def stepped(self, facts: StepFacts) -> None:
        active = self.loop.active
        assert isinstance(active, SimGeneration)
        if active.number == facts.generation:
            self.probation.observe(Step(facts.chunk, active.step_ms, facts.nonfinite))
        breach = self.probation.breach() if self.probation.running else None
        if breach is not None:
            target = self.machine.breach(breach.what)
            if target is not None and self.machine.pending is None:
                self.request(target, "auto")

    def fallback(self, generation: int, why: str) -> WayBack | None:
        target = self.machine.breach(why)
        if target is None:
            return None
        self.machine.fall_back()
        self.device.reaper.protect(None)
        self.probation.end(committed=False)
        self.fallbacks += 1
        before = self.generations[target]
        return WayBack(before, carries=before.carries(self.generations[generation]))

    def exchanged(self) -> None:
        pending, active = self.pending, self.machine.active
        assert pending is not None
        assert active is not None
        schedule = self.loop.schedule
        if pending.ahead:
            assert schedule.behind(pending.target.number, active) <= 0, "an exchange that makes clients wait"
        elif pending.mode == "drain":
            assert not schedule.running, "an exchange before the last sequence ended"
        self.machine.exchange()
        self.exchanges += 1
        self.device.reaper.protect(self.machine.rollback_target)
        if self.machine.rollback_target is None:
            self.probation.end(committed=False)
        else:
            self.probation.begin()

    def missed(self) -> None:
        if self.machine.pending is not None:
            self.machine.miss()

    # Events.

    def request(self, number: int, policy: Any) -> None:
        self.machine.request(number)
        assert self.machine.active is not None
        active, target = self.generations[self.machine.active], self.generations[number]
        try:
            mode = resolve(policy, carries=target.carries(active), same_vocabulary=True)
        except SwapRefusedError:
            self.machine.miss()
            raise
        ahead = mode == "recompute" and target.graphs is not active.graphs
        assert self.machine.pending == number
        self.pending = PendingSwap(target, mode, ahead, 0.0, math.inf, None, self.exchanged, self.missed)
        self.replies.append(self.pending.reply)
        self.loop.request_swap(self.pending)

    def submit(self) -> None:
        if not self.attached.done():
            return
        stem = self.random.choice(STEMS)
        prompt = [*stem, *(self.random.randrange(VOCAB) for _ in range(self.random.randrange(4)))]
        request = SimRequest(prompt, self.random.randint(1, 24), self.random.randrange(3 * VOCAB))
        number = next(self.request_ids)
        self.front.requests[number] = request
        self.loop.post(Submit(number, tuple(prompt), request.tokens_max, Sampling(), (request.stop,)))

    def cancel(self) -> None:
        if self.front.open:
            self.loop.post(Cancel(self.random.choice(self.front.open)))

    def begin(self) -> None:
        number, copy = next(self.numbers), self.random.random() < 0.25
        self.machine.begin(number, "copy" if copy else "exchange")
        self.build(number, self.random.choice((101, 101, 202)), copy=copy)
        self.progress[number] = 0

    def stage(self) -> None:
        """One event further, in whatever order: the machine refuses what does not fit."""
        for number in list(self.progress):
            if self.random.random() < 0.1:
                self.machine.fail(number)
                del self.progress[number]
                self.generations.pop(number).freed = True
            else:
                self.machine.apply(number, STAGES[self.progress[number]], BUCKETS)
                self.progress[number] += 1
                if self.progress[number] == len(STAGES):
                    del self.progress[number]

    def skip_warming(self) -> None:
        for number in [one for one, done in self.progress.items() if done == STAGES.index(Event.WARMED)]:
            self.machine.apply(number, Event.CAPTURED)
            with pytest.raises(SwapRefusedError, match="never warmed"):
                self.machine.apply(number, Event.VERIFIED)
            self.machine.fail(number)
            del self.progress[number]
            self.generations.pop(number).freed = True

    def swap(self) -> None:
        number = self.random.choice([*self.machine.states, 999])
        self.request(number, self.random.choice(("auto", "auto", "recompute", "carry", "drain")))

    def release(self) -> None:
        number = self.random.choice([*self.machine.states, 999])
        commits = number == self.machine.committed
        state = self.machine.release(number)
        if state is not State.READY:
            del self.progress[number]
            self.generations.pop(number).freed = True
            self.machine.apply(number, Event.FREED)
            return
        if commits:
            self.device.reaper.protect(None)
            self.probation.end(committed=True)
        generation = self.generations[number]
        self.loop.detach(generation).add_done_callback(lambda _: self.device.reaper.retire(number))

    def reap(self) -> None:
        for number in self.device.reaper.due():
            assert number not in self.device.launches.values(), "freed while the device still works for it"
            assert number != self.machine.rollback_target
            self.device.reaper.freed(number)
            self.generations.pop(number).freed = True
            self.machine.apply(number, Event.FREED)

    def complete(self) -> None:
        while self.device.launches and self.random.random() < 0.8:
            epoch = self.random.choice(list(self.device.launches))
            del self.device.launches[epoch]
            self.device.reaper.completed(epoch)

    def deadline(self) -> None:
        if self.pending is not None:
            self.pending.deadline_s = -math.inf

    def hard_stop(self) -> None:
        if self.pending is not None:
            self.pending.hard_stop_s = -math.inf

    def spoil(self) -> None:
        """A defect in a generation that is not committed."""
        for number, generation in self.generations.items():
            if number != self.machine.committed and self.machine.states[number] in (State.READY, State.ACTIVE):
                defect = self.random.choice(("fail_steps", "nan_rows", "step_ms"))
                setattr(generation, defect, SLOW_STEP_MS if defect == "step_ms" else 1)

    def spoil_one_row(self) -> None:
        if self.machine.active is not None and self.machine.active == self.machine.committed:
            self.generations[self.machine.active].nan_rows = 1

    def reclaim(self) -> None:
        self.loop.reclaim(self.random.randrange(BLOCKS))

    def crash(self) -> None:
        """kill -9: the restarted process loads the last committed build."""
        committed = self.machine.crash()
        assert committed is not None
        for request in self.front.requests.values():
            request.finish = request.finish or "crashed"
        for generation in self.generations.values():
            generation.freed = True
        for reply in self.replies:
            reply.cancel()
        self.crashes += 1
        self.boot(self.weights[committed])

    def reattach(self) -> None:
        for request in self.front.requests.values():
            request.finish = request.finish or "front gone"
        self.attach()

    def turn(self) -> None:
        try:
            self.loop.turn()
        except InjectedError:
            assert self.machine.active == self.machine.committed, "there was a way back"
            self.crash()

    def check(self) -> None:
        assert not self.device.violations, self.device.violations
        active = [number for number, state in self.machine.states.items() if state is State.ACTIVE]
        assert active == [self.machine.active], "never two ACTIVE, never none"
        assert self.loop.active is self.generations[active[0]]
        assert len(self.machine.resident) <= RESIDENT_MAX
        assert set(self.generations) == set(self.machine.resident)
        for generation in self.generations.values():
            pool = generation.pool.blocks
            assert pool.held + pool.idle + len(pool.free) == BLOCKS
            assert {entry.generation for entry in pool._by_block.values()} <= set(self.machine.resident)


EVENTS: tuple[tuple[str, float], ...] = (
    ("turn", 100), ("submit", 20), ("cancel", 2), ("begin", 16), ("stage", 60), ("skip_warming", 1), ("swap", 30),
    ("release", 10), ("reap", 10), ("complete", 20), ("deadline", 1), ("hard_stop", 2), ("spoil", 6),
    ("spoil_one_row", 0.5), ("reclaim", 2), ("crash", 0.4), ("reattach", 0.4),
)  # fmt: skip


def simulate(seed: int, events: int) -> Host:
    host = Host(seed)
    names, odds = zip(*EVENTS, strict=True)
    history = []
    try:
        for name in host.random.choices(names, odds, k=events):
            history.append(name)
            try:
                getattr(host, name)()
            except SwapRefusedError:
                history[-1] += " refused"
            if name == "turn":
                host.check()
        settle(host)
    except Exception as error:
        raise AssertionError(f"seed {seed}, after {history[-12:]}: {error}") from error
    return host


def settle(host: Host) -> None:
    """Everything that was asked for ends, exactly once, without further events."""
    for _ in range(SETTLE_TURNS_MAX):
        host.turn()
        host.check()
        if not (host.front.open or host.machine.pending):
            break
    assert not host.front.open, "requests that never end"
    assert all(reply.done() for reply in host.replies), "a swap that was never answered"
    assert all(request.finish for front in host.fronts for request in front.requests.values())
    for generation in host.generations.values():
        assert generation.pool.blocks.held == 0, "blocks that nobody gives back"


@pytest.mark.parametrize("seed", range(150))
def test_no_event_breaks_an_answer(seed: int) -> None:
    simulate(seed, EVENTS_PER_SEED)


def test_a_failed_step_leaves_no_uncleared_block() -> None:
    host = Host(0)
    first = host.generations[1]
    for block in first.pool.blocks.free:
        first.pool.spoil(block)
    second = SimGeneration(2, first.weights, first.pool, SimGraphs(2), first.limits, host.device, fail_steps=1)
    host.generations[2], host.weights[2] = second, second.weights
    host.machine.begin(2)
    for event in STAGES:
        host.machine.apply(2, event, BUCKETS)
    host.front.requests[1] = SimRequest([1] * BLOCK_TOKENS, 8, stop=VOCAB)
    host.loop.post(Submit(1, (1,) * BLOCK_TOKENS, 8, Sampling()))
    host.request(2, "carry")
    # The step after the exchange needs a new block, and fails before it is cleared.
    settle(host)
    assert (host.exchanges, host.fallbacks, host.front.requests[1].finish) == (1, 1, "length")


def test_the_simulation_reaches_what_it_is_for() -> None:
    hosts = [simulate(seed, EVENTS_PER_SEED) for seed in range(1000, 1040)]
    finishes = {request.finish for host in hosts for front in host.fronts for request in front.requests.values()}
    assert finishes == {"stop", "length", "cancelled", "error", "crashed", "front gone"}
    assert sum(host.exchanges for host in hosts) > 40
    assert sum(front.prefix_hits for host in hosts for front in host.fronts) > 40
    assert sum(host.fallbacks for host in hosts) > 5
    assert sum(host.crashes for host in hosts) > 5


def test_a_seed_replays() -> None:
    first, second = simulate(7, EVENTS_PER_SEED), simulate(7, EVENTS_PER_SEED)
    assert [front.requests for front in first.fronts] == [front.requests for front in second.fronts]
