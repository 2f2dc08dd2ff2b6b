"""The pool of KV blocks as bookkeeping: free, held, or kept for the prefix they contain. Pure.

A block holds the keys and values of ``block_tokens`` consecutive tokens in every layer. Sequences hold
blocks by reference count. A full block can be registered under its prefix: the chain of all tokens up to
its end, and the generation whose weights made it. When nobody holds it any more it stays, and the next
sequence with that prefix takes it over; when blocks run out, the one unused for longest is evicted.

Prefix keys compare the tokens themselves, link by link, so two prefixes never share a key by chance
(the automatic prefix caching of vLLM hashes them instead: docs.vllm.ai, "Automatic Prefix Caching").
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

# Never written: what a table's unused entries point to, so that masked positions are finite.
ZERO_BLOCK = 0
# Written by padded rows, read by none.
SCRATCH_BLOCK = 1
# The first block that holds anybody's KV.
FIRST_BLOCK = 2


@dataclass(frozen=True, slots=True)
class _Entry:
    """A registered prefix: ``serial`` is what its continuations are linked to."""

    key: tuple[int, tuple[int, ...]]
    serial: int
    generation: int
    block: int


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that ``tokens`` tokens take."""
    return -(-tokens // block_tokens)


class BlockPool:
    """Which blocks are free, held, or idle (held by nobody, kept for their prefix).

    Args:
        ids: the blocks to give out, ascending.
        block_tokens: tokens per block.
    """

    def __init__(self, ids: Sequence[int], block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.capacity = len(ids)
        self._free = list(reversed(ids))
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._entries: dict[tuple[int, tuple[int, ...]], _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._last_serial = 0

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` could give out now."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks kept for their prefix alone."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """Blocks that sequences hold."""
        return len(self._references)

    @property
    def free(self) -> tuple[int, ...]:
        """Blocks with no content anybody wants."""
        return tuple(self._free)

    def allocate(self) -> int | None:
        """A block for new content, held once; evicts an idle one when none is free."""
        if not self._free and not self.evict(1):
            return None
        block = self._free.pop()
        self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a block that is held or idle."""
        self._idle.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1

    def release(self, block: int) -> None:
        """One holder less; without any it is idle if its prefix is registered, else free."""
        left = self._references[block] - 1
        if left:
            self._references[block] = left
            return
        del self._references[block]
        if block in self._by_block:
            self._idle[block] = None
        else:
            self._free.append(block)

    def match(self, generation: int, tokens: Sequence[int]) -> list[int]:
        """Hold and return the blocks of the longest registered prefix of ``tokens``, whole blocks only."""
        found = []
        parent = self.root(generation)
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            entry = self._entries.get((parent, tuple(tokens[start : start + self.block_tokens])))
            if entry is None:
                break
            self.hold(entry.block)
            found.append(entry.block)
            parent = entry.serial
        return found

    @staticmethod
    def root(generation: int) -> int:
        """What the first block of a prefix is linked to: no generation finds another's prefixes."""
        return -1 - generation

    def link(self, block: int) -> int | None:
        """The serial to link a continuation of ``block`` to; None when its prefix is not registered."""
        entry = self._by_block.get(block)
        return None if entry is None else entry.serial

    def register(self, generation: int, parent: int, tokens: Sequence[int], block: int) -> int:
        """Make a full, held block findable after ``parent``; returns the serial for the next block.

        When another block has this prefix already, that one stays and ``block`` remains private.
        """
        assert block in self._references
        key = (parent, tuple(tokens))
        entry = self._entries.get(key)
        if entry is None:
            self._last_serial += 1
            entry = _Entry(key, self._last_serial, generation, block)
            self._entries[key] = self._by_block[block] = entry
        return entry.serial

    def unregister(self, block: int) -> None:
        """Let nobody find ``block`` any more: its content is not to be trusted."""
        entry = self._by_block.pop(block, None)
        if entry is None:
            return
        del self._entries[entry.key]
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def forget(self, generation: int) -> None:
        """Drop every prefix that ``generation`` made."""
        for block in [block for block, entry in self._by_block.items() if entry.generation == generation]:
            self.unregister(block)

    def evict(self, blocks_max: int) -> int:
        """Free up to ``blocks_max`` idle blocks, the longest unused first; returns how many."""
        count = min(blocks_max, len(self._idle))
        for _ in range(count):
            self.unregister(next(iter(self._idle)))
        return count
