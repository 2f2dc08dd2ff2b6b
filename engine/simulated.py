"""Generations that compute nothing, and a front, that check everything: oracles for simulations of the serve loop.

KV is a chain of hashes over weights and tokens, so what a position must hold is known exactly. A step that
reads KV of other weights, of another sequence, of a freed block or of a stale prefix is seen at once, and
so is one on a freed generation or on weights that are not installed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.blocks import FIRST_BLOCK, BlockPool
from engine.reaper import Reaper
from engine.schedule import Feed, Limits, StepPlan
from engine.table import KvSpace
from engine.wire import Admitted, Exchanged, ToFront, Token, Tokens

VOCAB, BLOCK_TOKENS = 40, 4
# Few enough for full sequences to run out of them.
BLOCKS = 15
_CLEARED, _NOT_FINITE = 0, -1
_HASH_MASK = (1 << 63) - 1
# The low bits of a tuple's hash follow its last element.
_TOKEN_SHIFT = 9


class InjectedError(Exception):
    """What a failing device would raise."""


@functools.lru_cache(maxsize=1 << 16)
def _link(before: int, token: int) -> int:
    return hash((before, token)) & _HASH_MASK


def chain(weights: int, tokens: Sequence[int]) -> list[int]:
    """What KV of ``tokens`` under ``weights`` is, position by position."""
    return list(itertools.accumulate(tokens, _link, initial=weights))[1:]


def _after(kv: int) -> int:
    return (kv >> _TOKEN_SHIFT) % VOCAB


def next_token(weights: int, tokens: Sequence[int]) -> int:
    """The reference: the token after ``tokens``, a pure function of the weights and of all of them."""
    return _after(chain(weights, tokens)[-1])


@dataclass
class SimPool:
    """KV memory by (block, offset)."""

    blocks: BlockPool = field(default_factory=lambda: BlockPool(range(FIRST_BLOCK, FIRST_BLOCK + BLOCKS), BLOCK_TOKENS))
    memory: dict[tuple[int, int], int] = field(default_factory=dict)

    def clear(self, block: int) -> None:
        """Zero a block."""
        for offset in range(BLOCK_TOKENS):
            self.memory[block, offset] = _CLEARED

    def spoil(self, block: int) -> None:
        """Leave values in a block that are not finite, as a request that went wrong does."""
        for offset in range(BLOCK_TOKENS):
            self.memory[block, offset] = _NOT_FINITE

    def at(self, feed: Feed, position: int) -> tuple[int, int]:
        """Where a sequence's position lies."""
        return feed.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS

    def give_back(self) -> int:
        """Forget what free blocks hold, as returning their pages does."""
        for block in self.blocks.free:
            self.clear(block)
        return len(self.blocks.free)


@dataclass
class SimGraphs:
    """Graphs and the weights in place; two generations share them in copy mode."""

    installed: int


@dataclass
class SimDevice:
    """What all generations of one process run on.

    Attributes:
        launches: epochs under way and whose they are; a simulation completes them when it likes.
        violations: what must never happen, and did.
    """

    reaper: Reaper = field(default_factory=Reaper)
    launches: dict[int, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


@dataclass(eq=False)
class SimGeneration:
    """A :class:`engine.servable.Servable`.

    Attributes:
        fail_steps: so many steps raise, from the next on.
        nan_rows: so many rows of logits are not finite, and neither is the KV behind them.
        step_ms: what a step is said to take.
    """

    number: int
    weights: int
    pool: SimPool
    graphs: SimGraphs
    limits: Limits
    device: SimDevice
    chunk_tokens_max: int = 6
    freed: bool = False
    fail_steps: int = 0
    nan_rows: int = 0
    step_ms: float = 20.0

    @property
    def space(self) -> KvSpace:
        """See the protocol."""
        return KvSpace(self.number, self.pool.blocks)

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """See the protocol.

        Raises:
            InjectedError: as often as ``fail_steps`` says.
        """
        if self.freed:
            self.device.violations.append(f"generation {self.number} runs after it was freed")
        if self.graphs.installed != self.number:
            self.device.violations.append(f"generation {self.number} runs on weights of {self.graphs.installed}")
        self.device.launches[self.device.reaper.launched(self.number)] = self.number
        if self.fail_steps:
            self.fail_steps -= 1
            raise InjectedError("a step that cannot be computed")
        for block in plan.fresh:
            self.pool.clear(block)
        rows = [row for feed in plan.feeds if (row := self._feed(feed)) is not None]
        return torch.stack(rows) if rows else None

    def _feed(self, feed: Feed) -> torch.Tensor | None:
        tokens, memory = feed.sequence.tokens[: feed.end], self.pool.memory
        if tuple(tokens[feed.position :]) != feed.tokens:
            self.device.violations.append(f"request {feed.sequence.request} is fed tokens that it does not have")
        right = chain(self.weights, tokens)
        spoilt = feed.emits and self.nan_rows > 0
        self.nan_rows -= spoilt
        for position in range(feed.position, feed.end):
            memory[self.pool.at(feed, position)] = _NOT_FINITE if spoilt else right[position]
        read = [memory.get(self.pool.at(feed, position), _CLEARED) for position in range(feed.end)]
        if not spoilt and read != right:
            wrong = next(i for i, (a, b) in enumerate(zip(read, right, strict=True)) if a != b)
            self.device.violations.append(f"request {feed.sequence.request} reads foreign KV at position {wrong}")
        beyond = range(feed.end, len(feed.blocks) * BLOCK_TOKENS)
        if any(memory.get(self.pool.at(feed, position)) == _NOT_FINITE for position in beyond):
            # Masked, but attention multiplies it by 0, and that is not 0.
            self.device.violations.append(f"request {feed.sequence.request} looks at values that are not finite")
        if not feed.emits:
            return None
        row = torch.zeros(VOCAB)
        row[_after(read[-1])] = math.nan if spoilt else 1.0
        return row

    def install(self) -> None:
        """See the protocol."""
        self.graphs.installed = self.number

    def give_back(self) -> int:
        """See the protocol."""
        return self.pool.give_back()

    def carries(self, other: SimGeneration) -> bool:
        """As :meth:`engine.generation.Generation.carries`."""
        return self.pool is other.pool and self.weights == other.weights


@dataclass
class SimRequest:
    """A request and what its client got. ``stop`` is the token that ends it, never emitted."""

    prompt: list[int]
    tokens_max: int
    stop: int
    answer: list[int] = field(default_factory=list)
    finish: str | None = None


@dataclass
class SimFront:
    """What clients see: every token is the reference's, for the generation that says it made it.

    Attributes:
        weights: of each generation that ever was, by number.
        serving: the generation announced last.
        prefix_hits: requests that found some of their prompt computed already.
    """

    weights: Mapping[int, int]
    serving: int = 0
    requests: dict[int, SimRequest] = field(default_factory=dict)
    prefix_hits: int = 0

    @property
    def open(self) -> list[int]:
        """Requests that have not ended."""
        return [number for number, request in self.requests.items() if request.finish is None]

    def receive(self, message: ToFront) -> None:
        """Take and check a message of the engine."""
        if isinstance(message, Exchanged):
            self.serving = message.generation
        elif isinstance(message, Admitted):
            assert message.cached_tokens % BLOCK_TOKENS == 0
            assert message.cached_tokens < len(self.requests[message.request].prompt)
            self.prefix_hits += message.cached_tokens > 0
        elif isinstance(message, Tokens):
            assert message.generation == self.serving, "tokens of a generation that was not announced"
            for token in message.tokens:
                self._take(self.requests[token.request], self.weights[message.generation], token)

    @staticmethod
    def _take(request: SimRequest, weights: int, token: Token) -> None:
        assert request.finish is None, "a request ends once"
        right = next_token(weights, request.prompt + request.answer)
        if token.token >= 0:
            assert token.token == right, "an answer that neither build would give"
            assert right != request.stop, "a stop token is not emitted"
            request.answer.append(token.token)
        if token.finish == "stop":
            assert right == request.stop, "stopped where the reference goes on"
        request.finish = token.finish


class Inline:
    """Runs what the loop gives to its helper thread at once: the same order in every run."""

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        """As an executor's."""
        done: Future[None] = Future()
        try:
            function(*arguments)
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)
        return done
