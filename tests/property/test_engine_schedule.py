"""The scheduler under random load, driven as the serve loop drives it, with a model that hashes tokens."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from engine.schedule import Limits, Schedule, Sequence, StepPlan
from engine.table import KvSpace
from engine.wire import Sampling

BLOCK_TOKENS = 4
# Room for two and a half full sequences: preemption and eviction happen.
BLOCKS = range(2, 17)
LIMITS = Limits(slots=4, context=24, vocab_size=50)
CHUNK = 4
STOP = 7


def next_token(tokens: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(tokens)) % LIMITS.vocab_size


class Serving(RuleBasedStateMachine):
    """A shadow of the KV cells: (generation, all tokens up to here) must stand at every position a step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.pool = BlockPool(BLOCKS, BLOCK_TOKENS)
        self.cells: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.emitted: dict[int, list[int]] = {}
        self.ends: Counter[int] = Counter()
        self.reasons: dict[int, str | None] = {}
        self.serving = 1
        self.last = 1
        # Generations with equal weights make the same KV.
        self.weights = {1: 1}
        self.count = 0

    @rule(
        # Mostly two tokens, so that prefixes are shared.
        prompt=st.lists(st.integers(0, 1), max_size=23) | st.lists(st.integers(-1, LIMITS.vocab_size), max_size=26),
        tokens_max=st.integers(0, 30),
        stop=st.booleans(),
    )
    def submit(self, prompt: list[int], tokens_max: int, stop: bool) -> None:
        self.count += 1
        stops = frozenset({STOP}) if stop else frozenset[int]()
        self.prompts[self.count] = list(prompt)
        self.emitted[self.count] = []
        assert self.schedule.submit(Sequence(self.count, list(prompt), tokens_max, Sampling(), 0, stops))

    @precondition(lambda self: self.count > len(self.ends))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        live = sorted(self.prompts.keys() - self.ends.keys())
        request = data.draw(st.sampled_from(live))
        assert not self.schedule.submit(Sequence(request, [1], 1, Sampling(), 0))
        token = self.schedule.cancel(request)
        assert token is not None
        assert self.schedule.cancel(request) is None
        self.end(request, token.finish)

    @rule(steps=st.integers(1, 6))
    def serve(self, steps: int) -> None:
        for _ in range(steps):
            self.turn()

    @rule(keep=st.booleans())
    def recompute(self, keep: bool) -> None:
        """Rebuild beside serving until level, then serve from there; the old one stays for a rollback, or not."""
        target = self.begin(new_weights=True)
        for _ in range(60):
            self.turn(ahead=target)
            if self.schedule.behind(target, self.serving) == 0:
                break
        else:
            # Blocks ran out for the rebuilding: the swap misses its deadline, serving went on.
            self.schedule.drop(target)
            self.pool.forget(target)
            return
        self.exchange(target, keep=keep)

    @rule(keep=st.booleans())
    def carry(self, keep: bool) -> None:
        target = self.begin(new_weights=False)
        self.schedule.carry(self.serving, target)
        self.exchange(target, keep=keep)

    def begin(self, *, new_weights: bool) -> int:
        # Numbers of ended generations are used again, weights never.
        target = self.serving % 2 + 1
        self.last += 1
        self.weights[target] = self.last if new_weights else self.weights[self.serving]
        return target

    def exchange(self, target: int, *, keep: bool) -> None:
        old, self.serving = self.serving, target
        if keep:
            self.turn(ahead=old)  # as if a rollback were prepared
        self.schedule.drop(old)
        self.pool.forget(old)

    def turn(self, ahead: int | None = None) -> None:
        self.schedule.sweep()
        space = KvSpace(self.serving, self.pool)
        admitted, ended = self.schedule.admit(LIMITS, space)
        for token in ended:
            self.end(token.request, token.finish)
        for sequence in admitted:
            self.check_cells(
                self.serving, sequence.tokens, sequence.tables[self.serving].blocks, sequence.prefix_tokens
            )
        plan = self.schedule.plan(space, chunk_tokens_max=CHUNK)
        if plan is not None:
            if ahead is not None:
                beside = self.schedule.plan_ahead(plan, KvSpace(ahead, self.pool), chunk_tokens_max=CHUNK)
                if beside is not None:
                    assert not any(feed.emits for feed in beside.feeds)
                    self.compute(ahead, beside)
            self.compute(self.serving, plan)
            for feed in plan.feeds:
                if feed.emits:
                    self.emit(feed.sequence)
        self.schedule.sweep()

    def compute(self, generation: int, plan: StepPlan) -> None:
        sequences = [feed.sequence for feed in plan.feeds]
        assert len(set(sequences)) == len(sequences)
        assert plan.context <= LIMITS.context
        for block in plan.fresh:
            for offset in range(BLOCK_TOKENS):
                self.cells.pop((block, offset), None)
        for feed in plan.feeds:
            assert 1 <= len(feed.tokens) <= (CHUNK if feed is plan.chunk else 1)
            tokens = feed.sequence.tokens
            assert tuple(tokens[feed.position : feed.end]) == feed.tokens
            for position in range(feed.position, feed.end):
                cell = feed.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                self.cells[cell] = self.weights[generation], tuple(tokens[: position + 1])
            self.check_cells(generation, tokens, feed.blocks, feed.end)
        self.schedule.consume(generation, plan)

    def check_cells(self, generation: int, tokens: list[int], blocks: tuple[int, ...] | list[int], count: int) -> None:
        for position in range(count):
            cell = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            assert self.cells[cell] == (self.weights[generation], tuple(tokens[: position + 1]))

    def emit(self, sequence: Sequence) -> None:
        request = sequence.request
        known = self.prompts[request] + self.emitted[request]
        assert sequence.tokens == known
        token = self.schedule.emit(sequence, next_token(known), LIMITS)
        if token.token >= 0:
            self.emitted[request].append(token.token)
        if token.finish is not None:
            self.end(request, token.finish)

    def end(self, request: int, reason: str | None) -> None:
        self.ends[request] += 1
        self.reasons[request] = reason

    @invariant()
    def every_request_ends_once_or_is_held_once(self) -> None:
        held = [sequence.request for sequence in self.schedule]
        assert len(set(held)) == len(held)
        assert all(count == 1 for count in self.ends.values())
        assert self.prompts.keys() - self.ends.keys() <= set(held)
        assert len(self.schedule.running) <= LIMITS.slots

    @invariant()
    def blocks_are_held_by_running_sequences_alone(self) -> None:
        held = {block for one in self.schedule.running for table in one.tables.values() for block in table.blocks}
        assert self.pool.held == len(held)
        assert not any(one.tables for one in self.schedule.waiting)

    def teardown(self) -> None:
        for _ in range(100 * (self.count + 1)):
            if self.count == len(self.ends):
                break
            self.turn()
        assert self.ends.keys() == self.prompts.keys()
        self.schedule.sweep()
        assert self.pool.held == 0
        for request, reason in self.reasons.items():
            self.check_end(request, reason)

    def check_end(self, request: int, reason: str | None) -> None:
        known = list(self.prompts[request])
        for token in self.emitted[request]:
            assert token == next_token(known)
            known.append(token)
        if reason == "stop":
            assert next_token(known) == STOP
        elif reason == "error":
            assert not known or any(not 0 <= token < LIMITS.vocab_size for token in known)
        assert reason in ("stop", "length", "cancelled", "error")


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)
