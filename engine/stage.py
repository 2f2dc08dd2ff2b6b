"""Stages a build beside the serving generation: load, capture, verify.

Graphs are captured on an arena of their own and only then bound to the arena in use, so staging cannot
disturb live KV: capturing runs the step, and the golden prompt needs slot 0. (Capturing on the live
arena with every row in the scratch slot would be safe as well, but leaves nothing to verify with.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.bucket import Bucket, all_buckets
from engine.errors import CaptureError, VerifyError
from engine.generation import Generation
from engine.golden import eager_tokens, greedy
from engine.graphs.port import Graph, GraphBackend, GraphExec
from engine.graphs.select import new_backend
from engine.kv import KvArena
from engine.loaded import LoadedBuild, load_build
from engine.model import StepBuffers
from engine.swap import Event

_MS = 1e3


@dataclass(frozen=True, slots=True)
class StageReport:
    """Durations in milliseconds, and whether the generation shares the arena in use."""

    carries: bool
    load_ms: float
    capture_ms: float
    warm_ms: float


class _Clock:
    """Splits elapsed time into laps."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def lap_ms(self) -> float:
        now = time.perf_counter()
        elapsed, self._start = now - self._start, now
        return elapsed * _MS


def _static(io: StepBuffers, kv: torch.Tensor) -> list[torch.Tensor]:
    return [io.rows, io.chunk, io.logits, kv]


def _capture(build: LoadedBuild, backend: GraphBackend, bucket: Bucket, static: Sequence[torch.Tensor]) -> Graph:
    def step(tensors: Sequence[torch.Tensor]) -> None:
        rows, chunk, logits, kv = tensors
        build.model.step(bucket, StepBuffers(rows, chunk, logits), kv)

    return backend.capture(step, static)


def _warm(backend: GraphBackend, bucket: Bucket, graph_exec: GraphExec, logits: torch.Tensor) -> None:
    """Replay once on the inputs of the capture, which must reproduce its result to the bit."""
    with backend.stream():
        eager = logits[: bucket.logits_rows].clone()
        logits.zero_()
        graph_exec.replay()
        backend.wait()
        if not torch.equal(eager.view(torch.int32), logits[: bucket.logits_rows].view(torch.int32)):
            raise CaptureError(f"the graph of {bucket} does not reproduce the eager step")


def _synthetic(io: StepBuffers, build: LoadedBuild) -> None:
    """Inputs for capturing: every row a different token, all in the scratch slot."""
    rows = io.rows.shape[1]
    io.rows.zero_()
    io.rows[0].copy_(torch.arange(rows) % build.config.vocab_size)
    io.rows[2].fill_(build.kv_shape.slots)
    io.chunk.copy_(torch.tensor((build.kv_shape.slots, 0)))


class _Stager:
    """One staging: its inputs, and the graphs as they come."""

    def __init__(self, build: LoadedBuild, backend: GraphBackend, checkpoint: Callable[[], None]) -> None:
        self.build = build
        self.backend = backend
        self.checkpoint = checkpoint
        self.arena, self.io = build.new_arena(), build.new_buffers()
        self.graphs: dict[Bucket, Graph] = {}
        self.execs: dict[Bucket, GraphExec] = {}

    def capture(self) -> tuple[float, float]:
        """Capture every bucket and warm it up; returns milliseconds spent on each."""
        clock = _Clock()
        capture_ms = warm_ms = 0.0
        _synthetic(self.io, self.build)
        static = _static(self.io, self.arena.data)
        for bucket in all_buckets(self.build.manifest.runtime):
            self.graphs[bucket] = _capture(self.build, self.backend, bucket, static)
            self.execs[bucket] = self.graphs[bucket].instantiate(static)
            capture_ms += clock.lap_ms()
            _warm(self.backend, bucket, self.execs[bucket], self.io.logits)
            warm_ms += clock.lap_ms()
            self.checkpoint()
        return capture_ms, warm_ms

    def verify(self, number: int) -> Generation:
        """The finished generation, in an arena of its own, zeroed again.

        Raises:
            VerifyError: its golden tokens are not the eager model's.
        """
        private = Generation(number, self.build, self.arena, self.io, self.execs, self.backend, golden=())
        golden = greedy(private.run, self.build, checkpoint=self.checkpoint)
        expected = eager_tokens(self.build, checkpoint=self.checkpoint)
        if golden != expected:
            raise VerifyError(f"graphs give golden tokens {list(golden)}, the eager model {list(expected)}")
        self.arena.data.zero_()
        return replace(private, golden=golden)

    def rebind(self, generation: Generation, arena: KvArena) -> Generation:
        """The same generation bound to ``arena``, without running anything there."""
        execs: dict[Bucket, GraphExec] = {}
        for bucket, graph in self.graphs.items():
            generation.execs[bucket].close()
            execs[bucket] = graph.instantiate(_static(self.io, arena.data))
            self.checkpoint()
        return replace(generation, arena=arena, execs=execs)


def stage(
    number: int,
    folder: Path,
    digest: str,
    *,
    device: torch.device,
    active: Generation | None,
    report: Callable[[Event], None],
    checkpoint: Callable[[], None],
) -> tuple[Generation, StageReport]:
    """Load, capture and verify a build; the result is warm and could serve at once.

    Args:
        number: of the new generation.
        folder: verified build.
        digest: its digest, compared with the manifest.
        device: where to run.
        active: the serving generation; its arena is shared when weights and KV signature are equal.
        report: told of each state passed.
        checkpoint: called often; may sleep to let the serve loop run, or raise to abandon staging.

    Raises:
        LoadError: see :func:`engine.loaded.load_build`.
        CaptureError: a bucket cannot be captured, or its replay differs from the eager run.
        VerifyError: golden tokens differ from the eager model's, or logits are not finite.
    """
    clock, backend = _Clock(), new_backend(device)
    with backend.stream():
        build = load_build(folder, device=device, expected_digest=digest, checkpoint=checkpoint)
        load_ms = clock.lap_ms()
        report(Event.LOADED)
        stager = _Stager(build, backend, checkpoint)
        capture_ms, warm_ms = stager.capture()
        report(Event.CAPTURED)
        generation = stager.verify(number)
        carries = active is not None and (
            active.build.weights_digest == build.weights_digest and active.build.kv_signature == build.kv_signature
        )
        if active is not None and carries:
            generation = stager.rebind(generation, active.arena)
        backend.wait()
        report(Event.VERIFIED)
    return generation, StageReport(carries=carries, load_ms=load_ms, capture_ms=capture_ms, warm_ms=warm_ms)
