"""Stages a build beside the serving generation: load, capture, verify.

Graphs are captured against the KV pool in use when its layout is equal. That disturbs nobody: capturing
and warming run the step with every row in the scratch block, looking at the zero block, and the golden
prompt has blocks of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.blocks import SCRATCH_BLOCK
from engine.bucket import Bucket, all_buckets
from engine.errors import CaptureError, LoadError, VerifyError
from engine.generation import Generation
from engine.golden import eager_tokens, greedy
from engine.graphs.port import GraphBackend, GraphExec, reproduces
from engine.graphs.select import new_backend
from engine.graphset import GraphSet
from engine.kv import KvPool
from engine.loaded import LoadedBuild, load_build
from engine.model import StepBuffers
from engine.swap import CommitMode, Event, Report

_CPU = torch.device("cpu")
_MS = 1e3


@dataclass(frozen=True, slots=True)
class StageReport:
    """Durations in milliseconds, and whether the generation carries KV of the serving one."""

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


def _synthetic(io: StepBuffers, build: LoadedBuild) -> None:
    """Inputs for capturing: every row a different token, written to scratch, looking at zeros."""
    rows = io.rows.shape[1]
    io.rows[0].copy_(torch.arange(rows) % build.config.vocab_size)
    io.rows[1].zero_()
    io.rows[2].fill_(SCRATCH_BLOCK * build.kv_layout.block_tokens)
    io.tables.zero_()
    io.last.zero_()


def _warm(backend: GraphBackend, bucket: Bucket, graph_exec: GraphExec, logits: torch.Tensor) -> None:
    """Replay once on the inputs of the capture, which must reproduce its result to the backend's tolerance."""
    with backend.stream():
        eager = logits[: bucket.logits_rows].clone()
        logits.zero_()
        graph_exec.replay()
        backend.wait()
        if not reproduces(eager, logits[: bucket.logits_rows], backend.tolerance):
            raise CaptureError(f"the graph of {bucket} does not reproduce the eager step")


def _capture(
    build: LoadedBuild,
    backend: GraphBackend,
    io: StepBuffers,
    kv: torch.Tensor,
    report: Report,
    checkpoint: Callable[[], None],
) -> tuple[Mapping[Bucket, GraphExec], float, float]:
    """Capture every bucket and warm it up; also returns milliseconds spent on each."""
    clock = _Clock()
    capture_ms = warm_ms = 0.0
    execs: dict[Bucket, GraphExec] = {}
    static = [io.rows, io.tables, io.last, io.logits, kv]
    try:
        for bucket in all_buckets(build.manifest.runtime):

            def step(tensors: Sequence[torch.Tensor], bucket: Bucket = bucket) -> None:
                rows, tables, last, logits, blocks = tensors
                build.model.step(bucket, StepBuffers(rows, tables, last, logits), blocks)

            _synthetic(io, build)
            execs[bucket] = backend.capture(step, static).instantiate(static)
            capture_ms += clock.lap_ms()
            _warm(backend, bucket, execs[bucket], io.logits)
            warm_ms += clock.lap_ms()
            report(Event.WARMED, [bucket])
            checkpoint()
    except BaseException:
        for graph_exec in execs.values():
            graph_exec.close()
        raise
    return execs, capture_ms, warm_ms


def _exchangeable(
    number: int,
    build: LoadedBuild,
    active: Generation | None,
    backend: GraphBackend,
    report: Report,
    checkpoint: Callable[[], None],
) -> tuple[Generation, float, float]:
    """A generation with graphs of its own.

    Raises:
        CaptureError, VerifyError: see :func:`stage`.
    """
    pool = _pool(build, active, backend)
    io = build.new_buffers()
    execs, capture_ms, warm_ms = _capture(build, backend, io, pool.data, report, checkpoint)
    report(Event.CAPTURED)
    graphs = GraphSet(number, execs, io, backend, build.model.weights, build.model.buffers)
    generation = Generation(number, build, pool, graphs, golden=())
    try:
        golden = _verify(generation, checkpoint)
    except BaseException:
        graphs.close_execs()
        raise
    return replace(generation, golden=golden), capture_ms, warm_ms


def _pool(build: LoadedBuild, active: Generation | None, backend: GraphBackend) -> KvPool:
    """The pool in use when it fits, else a new one.

    A backend that writes KV back as a whole would undo what another generation wrote meanwhile.
    """
    shared = (
        active is not None
        and backend.in_place
        and active.graphs.backend.in_place
        and active.build.kv_layout == build.kv_layout
        and active.build.device == build.device
    )
    return active.pool if active is not None and shared else build.new_pool()


def _verify(generation: Generation, checkpoint: Callable[[], None]) -> tuple[int, ...]:
    """The golden tokens of a captured generation.

    Raises:
        VerifyError: they are not the eager model's.
    """
    build, pool = generation.build, generation.pool
    golden = greedy(generation.run, build, pool, checkpoint=checkpoint)
    expected = eager_tokens(build, pool, checkpoint=checkpoint)
    if golden != expected:
        raise VerifyError(f"graphs give golden tokens {list(golden)}, the eager model {list(expected)}")
    return golden


def _copied(
    number: int,
    build: LoadedBuild,
    active: Generation,
    report: Report,
    checkpoint: Callable[[], None],
) -> Generation:
    """A generation that takes turns with ``active`` in its graphs.

    Raises:
        LoadError: the builds differ in more than weights.
        VerifyError: golden logits are not finite.
    """
    if build.config != active.build.config or build.manifest.runtime != active.build.manifest.runtime:
        raise LoadError("commit mode copy needs equal model configuration and runtime options")
    report(Event.WARMED, active.graphs.execs)
    report(Event.CAPTURED)
    golden = eager_tokens(build, build.golden_pool(), checkpoint=checkpoint)
    installed = load_build(active.build.folder, device=_CPU, expected_digest=active.digest, checkpoint=checkpoint)
    active.graphs.join(number, build.model.weights, installed.model.weights, checkpoint)
    return Generation(number, build, active.pool, active.graphs, golden)


def stage(
    number: int,
    folder: Path,
    digest: str,
    *,
    device: torch.device,
    active: Generation | None,
    report: Report,
    checkpoint: Callable[[], None],
    commit_mode: CommitMode = "exchange",
    make_backend: Callable[[torch.device], GraphBackend] = new_backend,
) -> tuple[Generation, StageReport]:
    """Load, capture and verify a build; the result is warm and could serve at once.

    Args:
        number: of the new generation.
        folder: verified build.
        digest: its digest, compared with the manifest.
        device: where to run.
        active: the serving generation; its KV pool is shared when the layout is equal, its weights when
            they are.
        report: told of each state passed.
        checkpoint: called often; may sleep to let the serve loop run, or raise to abandon staging.
        commit_mode: ``copy`` needs an active generation that differs in weights alone.
        make_backend: makes the generation's graph backend.

    Raises:
        LoadError: see :func:`engine.loaded.load_build`, or copy mode does not apply.
        CaptureError: a bucket cannot be captured, or its replay differs from the eager run.
        VerifyError: golden tokens differ from the eager model's, or logits are not finite.
    """
    clock, capture_ms, warm_ms = _Clock(), 0.0, 0.0
    if commit_mode == "copy":
        if active is None:
            raise LoadError("commit mode copy needs a serving generation")
        build = load_build(folder, device=_CPU, expected_digest=digest, checkpoint=checkpoint)
        load_ms = clock.lap_ms()
        report(Event.LOADED)
        generation = _copied(number, build, active, report, checkpoint)
    else:
        backend = make_backend(device)
        try:
            with backend.stream():
                resident = None if active is None else active.build
                build = load_build(
                    folder, device=device, expected_digest=digest, resident=resident, checkpoint=checkpoint
                )
                load_ms = clock.lap_ms()
                report(Event.LOADED)
                generation, capture_ms, warm_ms = _exchangeable(number, build, active, backend, report, checkpoint)
                backend.wait()
        except BaseException:
            backend.close()
            raise
    report(Event.VERIFIED)
    carries = active is not None and generation.carries(active)
    return generation, StageReport(carries=carries, load_ms=load_ms, capture_ms=capture_ms, warm_ms=warm_ms)
