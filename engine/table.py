"""The KV of one sequence under one generation: which blocks hold its tokens, in order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.blocks import BlockPool, blocks_for


@dataclass(frozen=True, slots=True)
class KvSpace:
    """Where a generation keeps KV: its number is the namespace of its prefixes in a pool it may share."""

    generation: int
    pool: BlockPool


class KvTable:
    """Blocks of one sequence; the first ``cached`` tokens of it are in them.

    Full blocks are registered as prefixes as they fill up, until the table is carried to another generation.
    """

    __slots__ = ("_link", "_linked", "_space", "blocks", "cached")

    def __init__(self, space: KvSpace, tokens: Sequence[int]) -> None:
        """Begin with the longest registered prefix of ``tokens``; the last token is always left to compute."""
        self._space = space
        self.blocks = space.pool.match(space.generation, tokens[:-1])
        self.cached = len(self.blocks) * space.pool.block_tokens
        self._linked = len(self.blocks)
        self._link = space.pool.link(self.blocks[-1]) if self.blocks else space.pool.root(space.generation)

    @property
    def pool(self) -> BlockPool:
        """Where the blocks come from."""
        return self._space.pool

    def grow(self, tokens: int) -> tuple[int, ...] | None:
        """Hold blocks for ``tokens`` tokens; returns the new ones, or None and nothing changed."""
        missing = blocks_for(tokens, self.pool.block_tokens) - len(self.blocks)
        if missing > self.pool.available:
            return None
        fresh = []
        for _ in range(missing):
            block = self.pool.allocate()
            assert block is not None
            fresh.append(block)
        self.blocks += fresh
        return tuple(fresh)

    def advance(self, tokens: Sequence[int], cached: int) -> None:
        """The first ``cached`` of ``tokens`` are computed: register the blocks that this filled."""
        self.cached = cached
        size = self.pool.block_tokens
        while self._link is not None and (self._linked + 1) * size <= cached:
            start, block = self._linked * size, self.blocks[self._linked]
            self._link = self.pool.register(self._space.generation, self._link, tokens[start : start + size], block)
            self._linked += 1

    def carry(self) -> None:
        """Another generation continues here: what follows is no prefix of either."""
        self._link = None

    def distrust(self) -> None:
        """What was computed is not finite: nobody may take it over."""
        self._link = None
        for block in self.blocks:
            self.pool.unregister(block)

    def close(self) -> None:
        """Let go of the blocks, the last first: a prefix outlives its continuations."""
        for block in reversed(self.blocks):
            self.pool.release(block)
        self.blocks = []
        self.cached = 0
