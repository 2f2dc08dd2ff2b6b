"""A generation: one loaded build with a graph exec per bucket, ready to serve.

Immutable, and reached by the serve loop through a single reference: a swap stores another one there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.bucket import Bucket
from engine.graphs.port import GraphBackend, GraphExec
from engine.kv import KvArena
from engine.loaded import LoadedBuild
from engine.model import StepBuffers
from engine.padding import bucket_of, fill, logits_row
from engine.schedule import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """See the module. ``golden`` holds the tokens of the golden prompt, as verified."""

    number: int
    build: LoadedBuild
    arena: KvArena
    io: StepBuffers
    execs: Mapping[Bucket, GraphExec]
    backend: GraphBackend
    golden: tuple[int, ...]

    @property
    def digest(self) -> str:
        """The build's digest."""
        return self.build.manifest.digest

    @property
    def chunk_tokens_max(self) -> int:
        """Tokens that one step can prefill."""
        return self.build.manifest.runtime.prefill_chunk_tokens

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Compute one step in this generation's arena.

        Returns:
            float32 ``[n, vocab_size]`` on the CPU, a row for each feed of ``plan.feeds`` that emits, in
            order; None when none does.
        """
        bucket = bucket_of(plan, self.build.manifest.runtime)
        with self.backend.stream():
            fill(self.io, plan, bucket, self.arena.shape)
            self.execs[bucket].replay()
            self.backend.wait()
            rows = [logits_row(feed, plan, bucket) for feed in plan.feeds if feed.emits]
            return self.io.logits[rows].cpu() if rows else None

    def close(self) -> None:
        """Drop every graph, then the backend; nothing runs on them any more."""
        self.backend.wait()
        for graph_exec in self.execs.values():
            graph_exec.close()
        self.backend.close()
