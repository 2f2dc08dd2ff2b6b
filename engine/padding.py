"""Writes a step plan into static buffers, padded to its bucket."""

from __future__ import annotations

import torch

from engine.bucket import Bucket, choose_bucket
from engine.build import RuntimeOptions
from engine.kv import KvShape
from engine.model import StepBuffers
from engine.schedule import Feed, StepPlan


def bucket_of(plan: StepPlan, runtime: RuntimeOptions) -> Bucket:
    """The smallest bucket that holds ``plan``."""
    return choose_bucket(runtime, decode_rows=plan.decode_rows, prefill=plan.chunk is not None, context=plan.context)


def fill(io: StepBuffers, plan: StepPlan, bucket: Bucket, shape: KvShape) -> None:
    """Fill ``io.rows`` and ``io.chunk``. Padding rows put token 0 at position 0 of the scratch slot.

    A padded decode row still reads the slot of its number, which may hold anything; its result is never
    looked at, and rows do not mix.
    """
    rows = [(0, 0, shape.slots)] * bucket.rows
    for feed in plan.decode:
        rows[feed.slot] = (feed.tokens[0], feed.position, feed.slot)
    if plan.chunk is not None:
        chunk = plan.chunk
        for offset, token in enumerate(chunk.tokens):
            rows[bucket.decode_rows + offset] = (token, chunk.position + offset, chunk.slot)
        io.chunk.copy_(torch.tensor((chunk.slot, bucket.decode_rows + len(chunk.tokens) - 1)))
    io.rows[:, : bucket.rows].copy_(torch.tensor(rows).t())


def logits_row(feed: Feed, plan: StepPlan, bucket: Bucket) -> int:
    """Where the step left the logits after ``feed``."""
    return bucket.decode_rows if feed is plan.chunk else feed.slot
