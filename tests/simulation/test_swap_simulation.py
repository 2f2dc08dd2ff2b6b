"""The real serve loop and swap machine under random events, on generations that check every KV they read.

A simulated generation "computes" KV as a chain of hashes over weights and tokens, so what a position must
hold is known exactly: KV of other weights, another sequence, a freed block or a stale prefix is seen at
the first step that reads it. Time does not pass: what depends on it (deadlines, launches under way, slow
steps) is an event like the others. A seed replays: run the test with its number.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.blocks import FIRST_BLOCK, BlockPool
from engine.errors import SwapRefusedError
from engine.exchange import resolve
from engine.loop import ServeLoop
from engine.pending import PendingSwap
from engine.probation import Probation, Step
from engine.reaper import Reaper
from engine.schedule import Limits, StepPlan
from engine.servable import StepFacts, WayBack
from engine.swap import RESIDENT_MAX, Event, State, SwapMachine
from engine.table import KvSpace
from engine.wire import Admitted, Cancel, Exchanged, Reply, Sampling, Submit, ToFront, Tokens

# Few enough blocks for full sequences to run out of them.
VOCAB, BLOCK_TOKENS, BLOCKS = 40, 4, 15
STEP_MS, SLOW_STEP_MS = 20.0, 200.0
BUCKETS = ("decode", "prefill")
STAGES = (Event.LOADED, Event.WARMED, Event.CAPTURED, Event.VERIFIED)
STEMS = ((5, 6, 7, 8, 9, 10, 11, 12, 13), (5, 6, 7, 8, 30, 31, 32, 33), (2,))
EVENTS_PER_SEED = 400
SETTLE_TURNS_MAX = 3000
NOT_FINITE = -1
torch.set_grad_enabled(False)


class InjectedError(Exception):
    """What a failing device would raise."""


@functools.lru_cache(maxsize=1 << 16)
def link(before: int, token: int) -> int:
    return hash((before, token)) & (2**63 - 1)


def chain(weights: int, tokens: list[int]) -> list[int]:
    """What KV of ``tokens`` under ``weights`` is, position by position."""
    return list(itertools.accumulate(tokens, link, initial=weights))[1:]


def following(digest: int) -> int:
    """The token that comes after a position: a pure function of weights and all tokens so far."""
    return (digest >> 9) % VOCAB


@dataclass
class Pool:
    """KV memory: (block, offset) → digest."""

    blocks: BlockPool = field(default_factory=lambda: BlockPool(range(FIRST_BLOCK, FIRST_BLOCK + BLOCKS), BLOCK_TOKENS))
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    given_back: int = 0


@dataclass
class Graphs:
    """Shared by two generations in copy mode."""

    installed: int


@dataclass(eq=False)
class SimGeneration:
    """A :class:`engine.servable.Servable`."""

    number: int
    weights: int
    pool: Pool
    graphs: Graphs
    limits: Limits
    host: Host
    chunk_tokens_max: int = 6
    freed: bool = False
    fail_steps: int = 0
    nan_rows: int = 0
    step_ms: float = STEP_MS

    @property
    def space(self) -> KvSpace:
        return KvSpace(self.number, self.pool.blocks)

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        host = self.host
        if self.freed:
            host.violations.append(f"generation {self.number} runs after it was freed")
        if self.graphs.installed != self.number:
            host.violations.append(f"generation {self.number} runs on weights of {self.graphs.installed}")
        host.launches.append(host.reaper.launched(self.number))
        if self.fail_steps:
            self.fail_steps -= 1
            raise InjectedError("a step that cannot be computed")
        for block in plan.fresh:
            for offset in range(BLOCK_TOKENS):
                self.pool.memory[block, offset] = 0
        rows = []
        for feed in plan.feeds:
            tokens = feed.sequence.tokens[: feed.end]
            assert tuple(tokens[feed.position :]) == feed.tokens
            right = chain(self.weights, tokens)
            spoilt = feed.emits and self.nan_rows > 0
            self.nan_rows -= spoilt
            for position in range(feed.position, feed.end):
                self.pool.memory[self._place(feed.blocks, position)] = NOT_FINITE if spoilt else right[position]
            read = [self.pool.memory.get(self._place(feed.blocks, position), 0) for position in range(feed.end)]
            if not spoilt and read != right:
                wrong = next(i for i, (a, b) in enumerate(zip(read, right, strict=True)) if a != b)
                host.violations.append(f"request {feed.sequence.request} reads foreign KV at position {wrong}")
            if feed.emits:
                row = torch.zeros(VOCAB)
                row[following(read[-1])] = math.nan if spoilt else 1.0
                rows.append(row)
        return torch.stack(rows) if rows else None

    @staticmethod
    def _place(blocks: tuple[int, ...], position: int) -> tuple[int, int]:
        return blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS

    def install(self) -> None:
        self.graphs.installed = self.number

    def give_back(self) -> int:
        for block in self.pool.blocks.free:
            for offset in range(BLOCK_TOKENS):
                self.pool.memory.pop((block, offset), None)
        self.pool.given_back += 1
        return len(self.pool.blocks.free)

    def carries(self, other: SimGeneration) -> bool:
        return self.pool is other.pool and self.weights == other.weights


@dataclass
class Request:
    prompt: list[int]
    tokens_max: int
    stop: int
    answer: list[int] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Front:
    """What a client sees: every token is the reference's for the generation that says it made it."""

    host: Host
    serving: int = 0
    requests: dict[int, Request] = field(default_factory=dict)

    def receive(self, message: ToFront) -> None:
        if isinstance(message, Exchanged):
            self.serving = message.generation
        elif isinstance(message, Admitted):
            request = self.requests[message.request]
            assert message.cached_tokens % BLOCK_TOKENS == 0
            assert message.cached_tokens < len(request.prompt)
            self.host.prefix_hits += message.cached_tokens > 0
        elif isinstance(message, Tokens):
            assert message.generation == self.serving, "tokens of a generation that was not announced"
            weights = self.host.weights[message.generation]
            for token in message.tokens:
                self._token(self.requests[token.request], weights, token.token, token.finish)

    def _token(self, request: Request, weights: int, token: int, finish: str | None) -> None:
        assert request.finish is None, "a request ends once"
        right = following(chain(weights, request.prompt + request.answer)[-1])
        if token >= 0:
            assert token == right, "an answer that neither build would give"
            request.answer.append(token)
        if finish == "stop":
            assert right == request.stop
        request.finish = finish

    @property
    def open(self) -> list[int]:
        return [number for number, request in self.requests.items() if request.finish is None]


class Inline:
    """Runs what the loop would give to its helper thread at once."""

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        try:
            function(*arguments)
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)
        return done


class Host:
    """Engine process and agent of one simulation; :class:`engine.servable.StepObserver` as the controller is."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation, replayed from its seed
        self.violations: list[str] = []
        self.numbers = itertools.count(1)
        self.request_ids = itertools.count(1)
        self.weights: dict[int, int] = {}
        self.replies: list[Future[Reply]] = []
        self.fronts: list[Front] = []
        self.prefix_hits = self.exchanges = self.fallbacks = self.crashes = 0
        self.boot(weights=101)

    def boot(self, weights: int) -> None:
        """A fresh process that serves ``weights``."""
        self.machine, self.reaper, self.probation = SwapMachine.empty(), Reaper(), Probation()
        self.generations: dict[int, SimGeneration] = {}
        self.progress: dict[int, int] = {}
        self.launches: list[int] = []
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
        pool, graphs = Pool(), Graphs(number)
        if isinstance(active, SimGeneration) and (copy or self.random.random() < 0.7):
            pool = active.pool
            if copy:
                graphs, slots, context = active.graphs, active.limits.slots, active.limits.context
        self.weights[number] = weights
        self.generations[number] = SimGeneration(
            number, weights, pool, graphs, Limits(slots, context, VOCAB), host=self
        )

    def attach(self) -> None:
        self.fronts.append(Front(self))
        # Who posts before is taken for the front before.
        self.attached = self.loop.attach(self.fronts[-1].receive)

    @property
    def front(self) -> Front:
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
        self.reaper.protect(None)
        self.probation.end(committed=False)
        self.fallbacks += 1
        before = self.generations[target]
        return WayBack(before, carries=before.carries(self.generations[generation]))

    def exchanged(self) -> None:
        self.machine.exchange()
        self.exchanges += 1
        self.reaper.protect(self.machine.rollback_target)
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
        self.pending = PendingSwap(target, mode, ahead, 0.0, math.inf, None, self.exchanged, self.missed)
        self.replies.append(self.pending.reply)
        self.loop.request_swap(self.pending)

    def submit(self) -> None:
        if not self.attached.done():
            return
        stem = self.random.choice(STEMS)
        prompt = [*stem, *(self.random.randrange(VOCAB) for _ in range(self.random.randrange(4)))]
        request = Request(prompt, self.random.randint(1, 24), self.random.randrange(3 * VOCAB))
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
            self.reaper.protect(None)
            self.probation.end(committed=True)
        generation = self.generations[number]
        self.loop.detach(generation).add_done_callback(lambda _: self.reaper.retire(number))

    def reap(self) -> None:
        for number in self.reaper.due():
            self.reaper.freed(number)
            self.generations.pop(number).freed = True
            self.machine.apply(number, Event.FREED)

    def complete(self) -> None:
        while self.launches and self.random.random() < 0.8:
            self.reaper.completed(self.launches.pop(self.random.randrange(len(self.launches))))

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
        assert not self.violations, self.violations
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


def test_the_simulation_reaches_what_it_is_for() -> None:
    hosts = [simulate(seed, EVENTS_PER_SEED) for seed in range(1000, 1040)]
    finishes = {request.finish for host in hosts for front in host.fronts for request in front.requests.values()}
    assert finishes == {"stop", "length", "cancelled", "error", "crashed", "front gone"}
    assert sum(host.exchanges for host in hosts) > 40
    assert sum(host.prefix_hits for host in hosts) > 40
    assert sum(host.fallbacks for host in hosts) > 5
    assert sum(host.crashes for host in hosts) > 5


def test_a_seed_replays() -> None:
    first, second = simulate(7, EVENTS_PER_SEED), simulate(7, EVENTS_PER_SEED)
    assert [front.requests for front in first.fronts] == [front.requests for front in second.fronts]
