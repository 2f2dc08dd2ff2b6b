"""Continuous batching as a pure core: who runs, in which KV blocks, and what each step computes.

A sequence is a list of known tokens and, per generation, a table of the KV blocks that hold some of them.
Feeding every token that a generation has not cached yields the next token, so prefill, decode, recovery
from preemption and rebuilding KV for another generation are one rule seen at different lags
(lag = known - cached).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.blocks import blocks_for
from engine.table import KvSpace, KvTable
from engine.wire import FinishReason, Sampling, Token

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Limits:
    """What the serving generation can hold: sequences, tokens per sequence, token ids."""

    slots: int
    context: int
    vocab_size: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. ``tables`` maps a generation's number to the KV that the sequence has under it.

    Attributes:
        generated: tokens of the answer so far, the last ``generated`` of ``tokens``.
        prefix_tokens: prompt tokens found in the prefix cache at the latest admission.
    """

    request: int
    tokens: list[int]
    tokens_max: int
    sampling: Sampling
    seed: int
    stop_tokens: frozenset[int] = frozenset()
    generated: int = 0
    prefix_tokens: int = 0
    finish: FinishReason | None = None
    tables: dict[int, KvTable] = field(default_factory=dict)

    def cached(self, generation: int) -> int:
        """Leading tokens that ``generation`` has KV for."""
        table = self.tables.get(generation)
        return 0 if table is None else table.cached

    def lag(self, generation: int) -> int:
        """Known tokens that ``generation`` has no KV for; at least 1 at a boundary, the newest was never fed."""
        return len(self.tokens) - self.cached(generation)

    def drop(self, generation: int) -> None:
        """Let go of the KV under ``generation``, if there is any."""
        table = self.tables.pop(generation, None)
        if table is not None:
            table.close()

    def drop_all(self) -> None:
        """Let go of all KV."""
        for generation in tuple(self.tables):
            self.drop(generation)


@dataclass(frozen=True, slots=True)
class Feed:
    """Consecutive tokens of a sequence, first at ``position``; ``emits`` when the one after them is new.

    ``blocks`` cover everything up to the last of ``tokens``.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    position: int
    blocks: tuple[int, ...]
    emits: bool

    @property
    def end(self) -> int:
        """Tokens of the sequence that are cached after this."""
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: one-token feeds, at most one chunk, and the blocks to clear before."""

    decode: tuple[Feed, ...]
    chunk: Feed | None
    fresh: tuple[int, ...] = ()

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """All feeds, the chunk last."""
        return self.decode if self.chunk is None else (*self.decode, self.chunk)

    @property
    def context(self) -> int:
        """KV positions looked at."""
        return max(feed.end for feed in self.feeds)


@dataclass(slots=True)
class Counters:
    """Since the beginning: tokens looked up in the prefix cache, found there, and preemptions."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0


class Schedule:
    """Waiting and running sequences. Every submitted request gets exactly one final :class:`Token`."""

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        # Oldest admission first.
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._known: dict[int, Sequence] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return iter((*self.running, *self.waiting))

    def submit(self, sequence: Sequence) -> bool:
        """Queue a request; False, and nothing done, when its id is already in use."""
        if sequence.request in self._known:
            return False
        self._known[sequence.request] = sequence
        self.waiting.append(sequence)
        return True

    def cancel(self, request: int) -> Token | None:
        """End a request now; :meth:`sweep` frees what it holds. None when it is unknown or already ended."""
        sequence = self._known.get(request)
        if sequence is None or sequence.finish is not None:
            return None
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            del self._known[request]
        return self._end(sequence, "cancelled")

    def admit(self, limits: Limits, space: KvSpace) -> tuple[list[Sequence], list[Token]]:
        """Run as many waiting requests as there are slots and blocks for, oldest first.

        Returns:
            The sequences admitted, and the end of requests that can never run.
        """
        admitted: list[Sequence] = []
        ended: list[Token] = []
        while self.waiting and len(self.running) < limits.slots:
            sequence = self.waiting[0]
            reason = _unfit(sequence, limits)
            if reason is not None:
                self.waiting.popleft()
                del self._known[sequence.request]
                ended.append(self._end(sequence, reason))
                continue
            table = KvTable(space, sequence.tokens)
            if self._owed(space) + self._need(sequence, table, space) > space.pool.available:
                table.close()
                break
            sequence.tables[space.generation] = table
            sequence.prefix_tokens = table.cached
            self.counters.prefix_query_tokens += len(sequence.tokens)
            self.counters.prefix_hit_tokens += table.cached
            self.running.append(self.waiting.popleft())
            admitted.append(sequence)
        return admitted, ended

    def plan(self, space: KvSpace, *, chunk_tokens_max: int) -> StepPlan | None:
        """The serving step: every sequence advances, the oldest of those behind by a whole chunk.

        When blocks run out, KV of other generations goes first, then the youngest sequence waits again.
        """
        chunk = next((one for one in self.running if one.lag(space.generation) > 1), None)
        decode: list[Feed] = []
        chunk_feed: Feed | None = None
        fresh: list[int] = []
        for sequence in tuple(self.running):
            if sequence not in self.running:
                break  # preempted for an older one, and all after it with it
            table = _table(sequence, space)
            end = min(table.cached + (chunk_tokens_max if sequence is chunk else 1), len(sequence.tokens))
            grown = self._grow(sequence, space, end)
            if grown is None:
                break
            fresh += grown
            feed = _feed(sequence, table, end, emits=end == len(sequence.tokens))
            if sequence is chunk:
                chunk_feed = feed
            else:
                decode.append(feed)
        if not decode and chunk_feed is None:
            return None
        return StepPlan(tuple(decode), chunk_feed, tuple(fresh))

    def plan_ahead(self, beside: StepPlan, space: KvSpace, *, chunk_tokens_max: int) -> StepPlan | None:
        """A step of another generation that emits nothing and, in the end, makes it level with the serving one.

        The sequence furthest behind gets the chunk. Near the end the others keep pace with their own
        decoding, so that all arrive together; before, that would only make the step longer, unless so
        many run that chunks alone could hardly keep up with them.

        Args:
            beside: the serving step computed at the same time; level means level after it.
            space: of the generation that rebuilds.
            chunk_tokens_max: tokens it can prefill in one step.

        Returns:
            None when nothing is behind, or there are no blocks to go on with.
        """
        ends = {feed.sequence: feed.end for feed in beside.feeds}
        gaps = {one: gap for one, end in ends.items() if (gap := end - _table(one, space).cached) > 0}
        furthest = max(gaps, key=gaps.__getitem__, default=None)
        if furthest is None:
            return None
        pace = gaps[furthest] <= chunk_tokens_max or 2 * len(gaps) >= chunk_tokens_max
        decode: list[Feed] = []
        chunk: Feed | None = None
        fresh: list[int] = []
        for sequence in gaps if pace else (furthest,):
            chunked = sequence is furthest and gaps[furthest] > 1
            table = _table(sequence, space)
            end = min(table.cached + (chunk_tokens_max if chunked else 1), ends[sequence])
            grown = table.grow(end)
            if grown is None:
                continue
            fresh += grown
            feed = _feed(sequence, table, end, emits=False)
            if chunked:
                chunk = feed
            else:
                decode.append(feed)
        if not decode and chunk is None:
            return None
        return StepPlan(tuple(decode), chunk, tuple(fresh))

    def behind(self, generation: int, serving: int) -> int:
        """Tokens of KV that ``generation`` lacks against ``serving``, of the sequence furthest behind."""
        return max((one.cached(serving) - one.cached(generation) for one in self.running), default=0)

    def consume(self, generation: int, plan: StepPlan) -> None:
        """Record that ``generation`` computed ``plan``."""
        for feed in plan.feeds:
            feed.sequence.tables[generation].advance(feed.sequence.tokens, feed.end)

    def abandon(self, generation: int, plan: StepPlan) -> None:
        """``plan`` failed half way: its fresh blocks may not be clear, so whoever got one begins again."""
        for feed in plan.feeds:
            if not set(plan.fresh).isdisjoint(feed.blocks):
                feed.sequence.drop(generation)

    def emit(self, sequence: Sequence, token: int, limits: Limits) -> Token:
        """Append a sampled token."""
        assert sequence.finish is None
        if token in sequence.stop_tokens:
            return self._end(sequence, "stop")
        sequence.tokens.append(token)
        sequence.generated += 1
        if sequence.generated >= sequence.tokens_max or len(sequence.tokens) >= limits.context:
            sequence.finish = "length"
        return Token(sequence.request, token, sequence.finish)

    def distrust(self, sequence: Sequence, generation: int) -> None:
        """Forget KV of ``generation`` that is not finite; nobody takes it over, a later step computes it again."""
        sequence.tables[generation].distrust()
        sequence.drop(generation)

    def fail(self, sequence: Sequence) -> Token:
        """End a sequence that cannot go on."""
        return self._end(sequence, "error")

    def sweep(self) -> None:
        """Drop ended sequences and what they hold."""
        for sequence in [one for one in self.running if one.finish is not None]:
            sequence.drop_all()
            self.running.remove(sequence)
            del self._known[sequence.request]

    def fits(self, limits: Limits, vocab_size: int) -> bool:
        """True when every running sequence could continue under ``limits`` with the vocabulary it began with."""
        return (
            limits.vocab_size == vocab_size
            and len(self.running) <= limits.slots
            and all(len(sequence.tokens) < limits.context for sequence in self.running)
        )

    def carry(self, source: int, target: int) -> None:
        """Running sequences go on under ``target`` with the KV they have under ``source``."""
        for sequence in self.running:
            table = sequence.tables.pop(source, None)
            sequence.drop(target)
            if table is not None:
                table.carry()
                sequence.tables[target] = table

    def drop(self, generation: int) -> None:
        """Let go of all KV under ``generation``."""
        for sequence in self.running:
            sequence.drop(generation)

    def _grow(self, sequence: Sequence, space: KvSpace, end: int) -> tuple[int, ...] | None:
        """Blocks for the first ``end`` tokens; None when ``sequence`` itself had to wait again."""
        table = sequence.tables[space.generation]
        while (grown := table.grow(end)) is None:
            if self._drop_standby(space):
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return None
        return grown

    def _drop_standby(self, space: KvSpace) -> bool:
        """Let go of one sequence's KV of another generation in the same pool; False when there is none."""
        for sequence in reversed(self.running):
            for generation, table in sequence.tables.items():
                if generation != space.generation and table.pool is space.pool and table.blocks:
                    sequence.drop(generation)
                    return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Make a running sequence wait, without KV; what it generated stays known."""
        self.running.remove(sequence)
        sequence.drop_all()
        if sequence.finish is None:
            self.waiting.appendleft(sequence)
            self.counters.preemptions += 1
        else:
            del self._known[sequence.request]

    def _owed(self, space: KvSpace) -> int:
        """Blocks that running sequences still take for tokens they have."""
        return sum(self._need(one, one.tables.get(space.generation), space) for one in self.running)

    @staticmethod
    def _need(sequence: Sequence, table: KvTable | None, space: KvSpace) -> int:
        held = 0 if table is None else len(table.blocks)
        # One token more than known: the first step of decoding must not preempt anybody.
        return max(0, blocks_for(len(sequence.tokens) + 1, space.pool.block_tokens) - held)

    @staticmethod
    def _end(sequence: Sequence, reason: FinishReason) -> Token:
        sequence.finish = reason
        return Token(sequence.request, NO_TOKEN, reason)


def _table(sequence: Sequence, space: KvSpace) -> KvTable:
    """The KV of ``sequence`` in ``space``; a new one begins with the prefix that the space has."""
    table = sequence.tables.get(space.generation)
    if table is None:
        table = sequence.tables[space.generation] = KvTable(space, sequence.tokens)
    return table


def _feed(sequence: Sequence, table: KvTable, end: int, *, emits: bool) -> Feed:
    tokens = tuple(sequence.tokens[table.cached : end])
    return Feed(sequence, tokens, table.cached, tuple(table.blocks), emits)


def _unfit(sequence: Sequence, limits: Limits) -> FinishReason | None:
    """Why a request cannot produce a single token, or None."""
    if not sequence.tokens or not all(0 <= token < limits.vocab_size for token in sequence.tokens):
        return "error"
    if sequence.tokens_max < 1 or len(sequence.tokens) >= limits.context:
        return "length"
    return None
