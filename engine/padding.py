"""Writes a step plan into static buffers, padded to its bucket."""

from __future__ import annotations

import torch

from engine.blocks import SCRATCH_BLOCK, ZERO_BLOCK, blocks_for
from engine.bucket import Bucket, choose_bucket
from engine.build import RuntimeOptions
from engine.model import StepBuffers
from engine.schedule import Feed, StepPlan


def bucket_of(plan: StepPlan, runtime: RuntimeOptions) -> Bucket:
    """The smallest bucket that holds ``plan``."""
    return choose_bucket(runtime, decode_rows=len(plan.decode), prefill=plan.chunk is not None, context=plan.context)


def fill(io: StepBuffers, plan: StepPlan, bucket: Bucket, block_tokens: int) -> None:
    """Fill ``io.rows``, ``io.tables`` and ``io.last``.

    Padding rows put token 0 at position 0 of the scratch block and look at the zero block; so do the unused
    entries of every table. Nothing a step reads depends on what another left in the scratch block.
    """
    span = blocks_for(bucket.context, block_tokens)
    rows = [(0, 0, SCRATCH_BLOCK * block_tokens)] * bucket.rows
    tables = [[ZERO_BLOCK] * span] * bucket.decode_rows
    for row, feed in enumerate(plan.decode):
        rows[row] = (feed.tokens[0], feed.position, _cell(feed, feed.position, block_tokens))
        tables[row] = _table(feed, span)
    if plan.chunk is not None:
        chunk = plan.chunk
        for row, token in enumerate(chunk.tokens):
            position = chunk.position + row
            rows[bucket.decode_rows + row] = (token, position, _cell(chunk, position, block_tokens))
        io.tables[-1, :span].copy_(torch.tensor(_table(chunk, span)))
        io.last.fill_(bucket.decode_rows + len(chunk.tokens) - 1)
    io.rows[:, : bucket.rows].copy_(torch.tensor(rows).t())
    if tables:
        io.tables[: bucket.decode_rows, :span].copy_(torch.tensor(tables))


def logits_rows(plan: StepPlan, bucket: Bucket) -> list[int]:
    """Where the step leaves the logits after each feed that emits, in the order of ``plan.feeds``."""
    rows = [row for row, feed in enumerate(plan.decode) if feed.emits]
    if plan.chunk is not None and plan.chunk.emits:
        rows.append(bucket.decode_rows)
    return rows


def _cell(feed: Feed, position: int, block_tokens: int) -> int:
    return feed.blocks[position // block_tokens] * block_tokens + position % block_tokens


def _table(feed: Feed, span: int) -> list[int]:
    # A table may hold blocks beyond this step's reach: those of an earlier, longer attempt.
    return (list(feed.blocks) + [ZERO_BLOCK] * span)[:span]
