"""A generation: one loaded build with a graph exec per bucket, ready to serve.

Immutable, and reached by the serve loop through a single reference: a swap stores another one there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.graphset import GraphSet
from engine.kv import KvPool
from engine.loaded import LoadedBuild
from engine.padding import bucket_of, fill, logits_rows
from engine.schedule import Limits, StepPlan
from engine.table import KvSpace


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """See the module. ``golden`` holds the tokens of the golden prompt, as verified."""

    number: int
    build: LoadedBuild
    pool: KvPool
    graphs: GraphSet
    golden: tuple[int, ...]

    @property
    def digest(self) -> str:
        """The build's digest."""
        return self.build.manifest.digest

    @property
    def space(self) -> KvSpace:
        """Where its KV lies."""
        return KvSpace(self.number, self.pool.blocks)

    @property
    def limits(self) -> Limits:
        """What the scheduler may put into it."""
        return self.build.limits

    @property
    def chunk_tokens_max(self) -> int:
        """Tokens that one step can prefill."""
        return self.build.manifest.runtime.prefill_chunk_tokens

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """What it computes with, by name; in copy mode what it would compute with once installed."""
        return self.graphs.weights_of(self.number)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Weights and buffers by name."""
        return {**self.weights, **self.graphs.buffers}

    def carries(self, other: Generation) -> bool:
        """True when KV made by ``other`` is what this generation would have made, at the same place."""
        return (
            self.pool is other.pool
            and self.build.weights_digest == other.build.weights_digest
            and self.build.kv_signature == other.build.kv_signature
        )

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """See :meth:`engine.servable.Servable.run`."""
        bucket = bucket_of(plan, self.build.manifest.runtime)
        graphs = self.graphs
        with graphs.backend.stream():
            self.pool.clear(plan.fresh)
            fill(graphs.io, plan, bucket, self.pool.layout.block_tokens)
            graphs.execs[bucket].replay()
            graphs.backend.wait()
            rows = logits_rows(plan, bucket)
            return graphs.io.logits[rows].cpu() if rows else None

    def install(self) -> None:
        """See :meth:`engine.servable.Servable.install`."""
        self.graphs.install(self.number)

    def give_back(self) -> int:
        """See :meth:`engine.servable.Servable.give_back`."""
        return self.pool.give_back()

    def close(self) -> None:
        """Drop its graphs, unless another generation uses them in copy mode; nothing runs on them any more."""
        self.graphs.leave(self.number)
