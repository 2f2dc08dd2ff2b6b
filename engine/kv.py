"""The KV pool: keys and values of every running sequence, in blocks at fixed addresses.

A pool outlives generations: whoever has the same layout captures its graphs against the pool in use,
whatever its weights, so a swap needs no second arena. Which block belongs to whom is bookkeeping
(:mod:`engine.blocks`); here is the memory (paged attention: arXiv:2309.06180).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import mmap
from collections.abc import Iterator, Sequence

import torch

from engine.blocks import FIRST_BLOCK, BlockPool, blocks_for
from engine.build import RuntimeOptions
from engine.llama import LlamaConfig

KEYS, VALUES = 0, 1
# The golden prompt and its answer: staging verifies in these, beside a pool that may be full.
GOLDEN_SPAN_TOKENS = 28
# Automatic size over what full sequences need, see RuntimeOptions.kv_blocks.
_HEADROOM = 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and dtype of a pool; generations of equal layout share one.

    Attributes:
        blocks: blocks that sequences can use; zero, scratch and golden blocks come on top.
        block_tokens: tokens per block.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    blocks: int
    block_tokens: int

    @classmethod
    def of(cls, config: LlamaConfig, runtime: RuntimeOptions) -> KvLayout:
        """The layout that a build asks for."""
        full = runtime.batch_sizes[-1] * blocks_for(runtime.contexts[-1], runtime.kv_block_tokens)
        return cls(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=runtime.dtype,
            blocks=runtime.kv_blocks or math.ceil(full * _HEADROOM),
            block_tokens=runtime.kv_block_tokens,
        )

    @property
    def golden_blocks(self) -> int:
        """Blocks that staging alone uses."""
        return blocks_for(GOLDEN_SPAN_TOKENS, self.block_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of one sequence that has all blocks."""
        return self.blocks * self.block_tokens


def kv_signature(config: LlamaConfig, layout: KvLayout) -> str:
    """``sha256:<hex>`` of everything but the weights that decides what KV a token leaves, and where.

    The whole configuration counts: keys depend on the rotary base and head counts directly, and on
    every other field through the layers below.
    """
    facts = {"config": dataclasses.asdict(config), "layout": dataclasses.asdict(layout)}
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class KvPool:
    """KV memory, zeroed, and the bookkeeping of its blocks.

    Attributes:
        data: ``[layers, 2, blocks, block_tokens, kv_heads, head_dim]``; one allocation, so that freeing it
            returns its pages to the system at once.
        blocks: blocks for sequences.
        golden: ids of the blocks that staging verifies in.
    """

    __slots__ = ("_memory", "_touched", "blocks", "data", "golden", "layout")

    def __init__(self, layout: KvLayout, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        first = FIRST_BLOCK + layout.golden_blocks
        self.golden = range(FIRST_BLOCK, first)
        self.blocks = BlockPool(range(first, first + layout.blocks), layout.block_tokens)
        self._touched = set(range(first, first + layout.blocks))
        shape = (layout.layers, 2, first + layout.blocks, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self._memory: mmap.mmap | None = None
        if device.type == "cpu":
            # Mapped by ourselves: whole pages, so that free blocks can be given back.
            size_bytes = math.prod(shape) * dtype.itemsize
            self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Touched now: a pool that fills up as requests come would look like a leak to whoever watches.
            self.data = torch.frombuffer(self._memory, dtype=dtype).view(shape).zero_()
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def size_bytes(self) -> int:
        """Reserved bytes."""
        return self.data.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.data[:, :, 0].numel() * self.data.element_size()

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks before their first use.

        Masked attention multiplies what is left there by 0, and a non-finite value would become NaN; and one
        request's KV does not stay for another to read.
        """
        self._touched.update(blocks)
        for block in blocks:
            self.data[:, :, block].zero_()

    def give_back(self) -> int:
        """Return the pages of used and freed blocks to the system, where it can be done (madvise(2), CPU only).

        Call it between steps.

        Returns:
            Bytes given back.
        """
        if self._memory is None:
            return 0
        given = 0
        unused = self._touched.intersection(self.blocks.free)
        self._touched -= unused
        stride_bytes = self.data[0, 0].numel() * self.data.element_size()
        row_bytes = stride_bytes // self.data.shape[2]
        for first, last in _runs(sorted(unused)):
            for plane in range(2 * self.layout.layers):
                start = plane * stride_bytes + first * row_bytes
                end = plane * stride_bytes + (last + 1) * row_bytes
                start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
                if start < end:
                    self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)
                    given += end - start
        return given


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    first = last = None
    for block in blocks:
        if first is None or last is None:
            first = last = block
        elif block == last + 1:
            last = block
        else:
            yield first, last
            first = last = block
    if first is not None and last is not None:
        yield first, last
