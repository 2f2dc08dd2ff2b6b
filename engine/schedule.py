"""Continuous batching as a pure core: who runs in which slot, and what each step computes.

A sequence is a list of known tokens and, per KV arena, a count of cached ones. Feeding every token not
yet cached in the arena yields the next token, so prefill, decode, and rebuilding KV for another
generation are one rule seen at different lags (lag = known - cached). Running sequences fill
slots 0..n-1 without holes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.wire import FinishReason, Sampling, Token

NO_TOKEN = -1
# Lag of a sequence that one decode brings up to date.
CATCH_UP_LAG = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What the serving generation can hold: sequences, tokens per sequence, token ids."""

    slots: int
    context: int
    vocab_size: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. ``cached`` maps an arena's serial to the number of leading tokens it holds."""

    request: int
    tokens: list[int]
    tokens_max: int
    sampling: Sampling
    seed: int
    stop_tokens: frozenset[int] = frozenset()
    generated: int = 0
    finish: FinishReason | None = None
    cached: dict[int, int] = field(default_factory=dict)

    def lag(self, arena: int) -> int:
        """Known tokens not yet cached in ``arena``; at least 1, because the newest token was never fed."""
        return len(self.tokens) - self.cached.get(arena, 0)


@dataclass(frozen=True, slots=True)
class Feed:
    """Consecutive tokens of the sequence in ``slot``, first at ``position``; ``emits`` when the next one is new."""

    slot: int
    tokens: tuple[int, ...]
    position: int
    emits: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: one-token feeds by ascending slot, and at most one chunk."""

    decode: tuple[Feed, ...]
    chunk: Feed | None

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """All feeds, the chunk last."""
        return self.decode if self.chunk is None else (*self.decode, self.chunk)

    @property
    def decode_rows(self) -> int:
        """Decode rows needed: row i belongs to slot i."""
        return self.decode[-1].slot + 1 if self.decode else 0

    @property
    def context(self) -> int:
        """KV positions looked at."""
        return max(feed.position + len(feed.tokens) for feed in self.feeds)


@dataclass(frozen=True, slots=True)
class Move:
    """KV to copy from slot ``source`` to ``target``; ``cached`` tokens per arena serial. In order."""

    source: int
    target: int
    cached: dict[int, int]


class Schedule:
    """Waiting and running sequences. Every submitted request gets exactly one final :class:`Token`."""

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._known: dict[int, Sequence] = {}
        self._admitted: dict[int, int] = {}
        self._admissions = 0

    def submit(self, sequence: Sequence) -> bool:
        """Queue a request; False, and nothing done, when its id is already in use."""
        if sequence.request in self._known:
            return False
        self._known[sequence.request] = sequence
        self.waiting.append(sequence)
        return True

    def cancel(self, request: int) -> Token | None:
        """End a request now; :meth:`sweep` frees its slot. None when it is unknown or already ended."""
        sequence = self._known.get(request)
        if sequence is None or sequence.finish is not None:
            return None
        if request not in self._admitted:
            self.waiting.remove(sequence)
            del self._known[request]
        return self._end(sequence, "cancelled")

    def admit(self, limits: Limits) -> list[Token]:
        """Fill free slots, oldest request first; returns the end of requests that can never run."""
        ended = []
        while self.waiting and len(self.running) < limits.slots:
            sequence = self.waiting.popleft()
            reason = _unfit(sequence, limits)
            if reason is not None:
                del self._known[sequence.request]
                ended.append(self._end(sequence, reason))
                continue
            self._admissions += 1
            self._admitted[sequence.request] = self._admissions
            self.running.append(sequence)
        return ended

    def plan(self, arena: int, *, chunk_tokens_max: int) -> StepPlan | None:
        """The serving step: every sequence advances, the longest admitted of those behind by a whole chunk."""
        behind = [slot for slot, sequence in enumerate(self.running) if sequence.lag(arena) > 1]
        chunk = min(behind, key=lambda slot: self._admitted[self.running[slot].request], default=None)
        return self._plan(arena, range(len(self.running)), chunk, keep=0, chunk_tokens_max=chunk_tokens_max)

    def plan_ahead(self, arena: int, *, chunk_tokens_max: int) -> StepPlan | None:
        """A step that rebuilds KV in ``arena`` and emits nothing; None when every lag is 1.

        The sequence furthest behind gets the chunk. Near the end the others keep pace with their own
        decoding, so that all arrive together; before, that would only make the step longer, unless so
        many run that chunks alone could hardly keep up with them.
        """
        lags = {slot: sequence.lag(arena) for slot, sequence in enumerate(self.running) if sequence.lag(arena) > 1}
        furthest = max(lags, key=lags.__getitem__, default=None)
        if furthest is None:
            return None
        if lags[furthest] == CATCH_UP_LAG:
            return self._plan(arena, lags, None, keep=1, chunk_tokens_max=chunk_tokens_max)
        pace = lags[furthest] <= chunk_tokens_max or 2 * len(lags) >= chunk_tokens_max
        return self._plan(arena, lags if pace else (), furthest, keep=1, chunk_tokens_max=chunk_tokens_max)

    def lag_max(self, arena: int) -> int:
        """The largest lag of the running sequences; 1 when nothing runs."""
        return max((sequence.lag(arena) for sequence in self.running), default=1)

    def _plan(
        self, arena: int, slots: Iterable[int], chunk: int | None, *, keep: int, chunk_tokens_max: int
    ) -> StepPlan | None:
        """Feed one token of each of ``slots``, or a chunk of ``chunk``; the last ``keep`` tokens are not fed."""
        decode = tuple(self._feed(slot, arena, keep, 1) for slot in slots if slot != chunk)
        if chunk is None:
            return StepPlan(decode, None) if decode else None
        return StepPlan(decode, self._feed(chunk, arena, keep, chunk_tokens_max))

    def _feed(self, slot: int, arena: int, keep: int, tokens_max: int) -> Feed:
        sequence = self.running[slot]
        start = sequence.cached.get(arena, 0)
        end = min(start + tokens_max, len(sequence.tokens) - keep)
        return Feed(slot, tuple(sequence.tokens[start:end]), start, emits=end == len(sequence.tokens))

    def consume(self, arena: int, plan: StepPlan) -> None:
        """Record that ``plan`` was computed in ``arena``."""
        for feed in plan.feeds:
            self.running[feed.slot].cached[arena] = feed.position + len(feed.tokens)

    def emit(self, slot: int, token: int | None, limits: Limits) -> Token:
        """Append a sampled token to the sequence in ``slot`` (None: its logits were not finite)."""
        sequence = self.running[slot]
        assert sequence.finish is None
        if token is None:
            return self._end(sequence, "error")
        if token in sequence.stop_tokens:
            return self._end(sequence, "stop")
        sequence.tokens.append(token)
        sequence.generated += 1
        if sequence.generated >= sequence.tokens_max or len(sequence.tokens) >= limits.context:
            sequence.finish = "length"
        return Token(sequence.request, token, sequence.finish)

    def sweep(self) -> list[Move]:
        """Drop ended sequences and close the holes they leave with the last running ones."""
        moves = []
        for slot in range(len(self.running) - 1, -1, -1):
            ended = self.running[slot]
            if ended.finish is None:
                continue
            del self._known[ended.request], self._admitted[ended.request]
            last = self.running.pop()
            if last is not ended:
                self.running[slot] = last
                moves.append(Move(len(self.running), slot, dict(last.cached)))
        return moves

    def fits(self, limits: Limits, vocab_size: int) -> bool:
        """True when every running sequence could continue under ``limits`` with the vocabulary it began with."""
        return (
            limits.vocab_size == vocab_size
            and len(self.running) <= limits.slots
            and all(len(sequence.tokens) < limits.context for sequence in self.running)
        )

    def forget(self, arena: int) -> None:
        """Distrust the KV of ``arena``: running sequences are prefilled again."""
        for sequence in self.running:
            sequence.cached.pop(arena, None)

    @staticmethod
    def _end(sequence: Sequence, reason: FinishReason) -> Token:
        sequence.finish = reason
        return Token(sequence.request, NO_TOKEN, reason)


def _unfit(sequence: Sequence, limits: Limits) -> FinishReason | None:
    """Why a request cannot produce a single token, or None."""
    if not sequence.tokens or not all(0 <= token < limits.vocab_size for token in sequence.tokens):
        return "error"
    if sequence.tokens_max < 1 or len(sequence.tokens) >= limits.context:
        return "length"
    return None
