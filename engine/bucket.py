"""Buckets: the finite set of step shapes, one captured graph each.

A step decodes ``decode_rows`` sequences and prefills ``prefill_rows`` tokens of one more, looking at
the first ``context`` KV positions. A step's real shape is padded up to the smallest bucket. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from engine.build import RuntimeOptions
from engine.errors import LoadError

# Every (batch size, chunk, context) triple is captured: 64 graphs of a 30-layer model stage in seconds.
BUCKETS_MAX = 64


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One step shape: rows are tokens, ``context`` is KV positions."""

    decode_rows: int
    prefill_rows: int
    context: int

    @property
    def rows(self) -> int:
        """Rows of the linear layers."""
        return self.decode_rows + self.prefill_rows

    @property
    def logits_rows(self) -> int:
        """Rows of logits: one per decode row, one for the last prefilled token."""
        return self.decode_rows + (1 if self.prefill_rows else 0)


def all_buckets(runtime: RuntimeOptions) -> tuple[Bucket, ...]:
    """Every bucket that ``runtime`` asks for, smallest first.

    Raises:
        LoadError: sizes not positive and ascending, or more than :data:`BUCKETS_MAX` buckets.
    """
    for name, sizes in (("batch_sizes", runtime.batch_sizes), ("contexts", runtime.contexts)):
        if not sizes or sizes[0] < 1 or any(low >= high for low, high in pairwise(sizes)):
            raise LoadError(f"runtime: {name} must be positive and ascending, not {list(sizes)}")
    if runtime.kv_block_tokens < 1 or runtime.kv_blocks < 0:
        raise LoadError("runtime: kv_block_tokens must be positive, kv_blocks positive or 0")
    if not 1 <= runtime.prefill_chunk_tokens <= runtime.contexts[0]:
        raise LoadError("runtime: prefill_chunk_tokens must be between 1 and the smallest context")
    buckets = tuple(
        Bucket(decode_rows, prefill_rows, context)
        for context in runtime.contexts
        for prefill_rows in (0, runtime.prefill_chunk_tokens)
        for decode_rows in (0, *runtime.batch_sizes)
        if decode_rows or prefill_rows
    )
    if len(buckets) > BUCKETS_MAX:
        raise LoadError(f"runtime: {len(buckets)} buckets, more than {BUCKETS_MAX}")
    return buckets


def choose_bucket(runtime: RuntimeOptions, *, decode_rows: int, prefill: bool, context: int) -> Bucket:
    """The smallest bucket that holds a step; the caller keeps within the largest sizes."""
    return Bucket(
        decode_rows=next(size for size in (0, *runtime.batch_sizes) if size >= decode_rows),
        prefill_rows=runtime.prefill_chunk_tokens if prefill else 0,
        context=next(size for size in runtime.contexts if size >= context),
    )
