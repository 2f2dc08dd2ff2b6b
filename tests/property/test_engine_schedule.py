"""The scheduler under random load, driven as the serve loop drives it, with a model that hashes tokens."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.schedule import CATCH_UP_LAG, Limits, Schedule, Sequence, StepPlan
from engine.wire import Sampling

OLD, NEW = 1, 2
LIMITS = Limits(slots=4, context=24, vocab_size=50)
CHUNK = 4
STOP = 7


def next_token(tokens: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(tokens)) % LIMITS.vocab_size


class Serving(RuleBasedStateMachine):
    """A shadow copy of the KV per arena and slot checks that every feed continues what the slot holds."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()
        self.kv: dict[int, list[list[int]]] = {arena: [[] for _ in range(LIMITS.slots)] for arena in (OLD, NEW)}
        self.prompts: dict[int, list[int]] = {}
        self.emitted: dict[int, list[int]] = {}
        self.ends: Counter[int] = Counter()
        self.reasons: dict[int, str | None] = {}
        self.serving = OLD
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(-1, LIMITS.vocab_size), max_size=26),
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

    @rule(steps=st.integers(1, 6), ahead=st.booleans())
    def serve(self, steps: int, ahead: bool) -> None:
        for _ in range(steps):
            self.turn(ahead=ahead)

    @rule()
    def exchange(self) -> None:
        """Rebuild beside serving until one token behind, catch up with one decode, serve from the other arena."""
        for _ in range(100):
            if self.schedule.lag_max(self.other) <= CATCH_UP_LAG:
                break
            self.turn(ahead=True)
        else:
            raise AssertionError("rebuilding never catches up")
        if (plan := self.schedule.plan_ahead(self.other, chunk_tokens_max=CHUNK)) is not None:
            assert plan.chunk is None
            self.compute(self.other, plan)
        assert self.schedule.lag_max(self.other) == 1
        self.serving = self.other

    @property
    def other(self) -> int:
        return NEW if self.serving == OLD else OLD

    def turn(self, *, ahead: bool) -> None:
        self.sweep()
        for token in self.schedule.admit(LIMITS):
            self.end(token.request, token.finish)
        beside = self.schedule.plan_ahead(self.other, chunk_tokens_max=CHUNK) if ahead else None
        plan = self.schedule.plan(self.serving, chunk_tokens_max=CHUNK)
        if beside is not None:
            assert not any(feed.emits for feed in beside.feeds)
            self.compute(self.other, beside)
        if plan is not None:
            self.compute(self.serving, plan)
            for feed in plan.feeds:
                if feed.emits:
                    self.emit(feed.slot)
        self.sweep()

    def compute(self, arena: int, plan: StepPlan) -> None:
        slots = [feed.slot for feed in plan.feeds]
        assert len(set(slots)) == len(slots)
        assert [feed.slot for feed in plan.decode] == sorted(feed.slot for feed in plan.decode)
        assert plan.context <= LIMITS.context
        for feed in plan.feeds:
            assert 1 <= len(feed.tokens) <= (CHUNK if feed is plan.chunk else 1)
            held = self.kv[arena][feed.slot]
            del held[feed.position :]
            assert len(held) == feed.position
            held.extend(feed.tokens)
        self.schedule.consume(arena, plan)

    def emit(self, slot: int) -> None:
        request = self.schedule.running[slot].request
        known = self.prompts[request] + self.emitted[request]
        # The KV that the step saw is exactly the sequence: its next token is the right one.
        assert self.kv[self.serving][slot][: len(known)] == known
        token = self.schedule.emit(slot, next_token(known), LIMITS)
        if token.token >= 0:
            self.emitted[request].append(token.token)
        if token.finish is not None:
            self.end(request, token.finish)

    def sweep(self) -> None:
        for move in self.schedule.sweep():
            for arena, slots in self.kv.items():
                slots[move.target] = list(slots[move.source][: move.cached.get(arena, 0)])
                slots[move.source] = [-1] * LIMITS.context

    def end(self, request: int, reason: str | None) -> None:
        self.ends[request] += 1
        self.reasons[request] = reason

    @invariant()
    def every_request_ends_once_or_is_held_once(self) -> None:
        held = [sequence.request for sequence in (*self.schedule.waiting, *self.schedule.running)]
        assert len(set(held)) == len(held)
        assert all(count == 1 for count in self.ends.values())
        assert self.prompts.keys() - self.ends.keys() <= set(held)
        assert len(self.schedule.running) <= LIMITS.slots

    def teardown(self) -> None:
        for _ in range(60 * (self.count + 1)):
            if self.count == len(self.ends):
                break
            self.turn(ahead=False)
        assert self.ends.keys() == self.prompts.keys()
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
TestServing.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
