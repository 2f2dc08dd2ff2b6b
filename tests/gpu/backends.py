"""Checks of the graph backend alone: conformance, replay, capture beside a replay, a failed capture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.blocks import SCRATCH_BLOCK
from engine.bucket import Bucket, all_buckets
from engine.errors import CaptureError
from engine.graphs import taint
from engine.graphs.conformance import CASES
from engine.graphs.port import GraphBackend, GraphExec
from engine.graphs.result import UpdateResult
from engine.graphs.select import new_backend
from engine.graphs.testing import Subject
from engine.loaded import load_build
from engine.model import StepBuffers
from tests.gpu.memory import used_bytes
from tests.gpu.plan import Build, Context
from tests.gpu.report import Row, quantile, spread

_US = 1e-3  # nanoseconds
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Step:
    """The largest decode step of a build, with memory of its own."""

    function: Callable[[Sequence[torch.Tensor]], None]
    static: list[torch.Tensor]


def _step(context: Context, build: Build) -> Step:
    loaded = load_build(build.folder, device=context.device)
    bucket: Bucket = max(found for found in all_buckets(loaded.manifest.runtime) if not found.prefill_rows)
    io = loaded.new_buffers()
    # Every row a token of its own, written to the scratch block; the zero block is all they look at.
    io.rows[0].copy_(torch.arange(io.rows.shape[1]) % loaded.config.vocab_size)
    io.rows[2].fill_(SCRATCH_BLOCK * loaded.kv_layout.block_tokens)

    def step(tensors: Sequence[torch.Tensor]) -> None:
        rows, tables, last, logits, kv = tensors
        loaded.model.step(bucket, StepBuffers(rows, tables, last, logits), kv)

    return Step(step, [io.rows, io.tables, io.last, io.logits, loaded.new_pool().data])


def conformance(context: Context) -> list[Row]:
    """Every case of the suite on this device."""
    subject = Subject(lambda: new_backend(context.device), context.device)
    rows = []
    for case in CASES:
        name = case.__name__.strip("_").replace("_", " ")
        try:
            case(subject)
        except Exception as error:
            rows.append(Row(name, f"{type(error).__name__}: {error}"[:200], target="holds", met=False))
    rows.append(Row("cases that hold", f"{len(CASES) - len(rows)} of {len(CASES)}"))
    return rows


def _times_us(context: Context, function: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(context.scale.rounds):
        began = time.perf_counter_ns()
        function()
        times.append((time.perf_counter_ns() - began) * _US)
    return times


def replay(context: Context) -> list[Row]:
    """A step replayed against the same step run eagerly; what capturing and updating cost."""
    backend, step, other = new_backend(context.device), _step(context, context.first), _step(context, context.other)
    began = time.perf_counter()
    graph = backend.capture(step.function, step.static)
    graph_exec = graph.instantiate(step.static)
    captured = time.perf_counter()
    graph_2 = backend.capture(other.function, other.static)
    update_began = time.perf_counter()
    result = graph_exec.update(graph_2)
    updated = time.perf_counter()

    def run_eagerly() -> None:
        with backend.stream(), torch.inference_mode():
            step.function(step.static)
            backend.wait()

    eager_us = _times_us(context, run_eagerly)
    replay_us = _times_us(context, lambda: _replay(backend, graph_exec))
    faster = quantile(replay_us, 0.5) <= quantile(eager_us, 0.5)
    graph_exec.close()
    backend.close()
    return [
        *spread("eager step", eager_us, "us"),
        *spread("replayed step", replay_us, "us"),
        Row("replay is not slower than eager", str(faster), target="True", met=faster),
        Row("capture and instantiate", round((captured - began) * 1e3, 2), "ms"),
        Row("update to other weights", round((updated - update_began) * 1e3, 2), "ms"),
        Row("update result", result.name, target="SUCCESS", met=result is UpdateResult.SUCCESS),
    ]


def _replay(backend: GraphBackend, graph_exec: GraphExec) -> None:
    with backend.stream():
        graph_exec.replay()
        backend.wait()


def capture_beside(context: Context) -> list[Row]:
    """One generation replays in a thread while another is captured, again and again."""
    serving, step = new_backend(context.device), _step(context, context.first)
    graph_exec = serving.capture(step.function, step.static).instantiate(step.static)
    _replay(serving, graph_exec)
    expected = step.static[3].clone()
    alone_us = _times_us(context, lambda: _replay(serving, graph_exec))
    beside_us: list[float] = []
    wrong = 0
    stop = threading.Event()

    def serve() -> None:
        nonlocal wrong
        while not stop.is_set():
            began = time.perf_counter_ns()
            _replay(serving, graph_exec)
            beside_us.append((time.perf_counter_ns() - began) * _US)
            with serving.stream():
                wrong += not torch.equal(step.static[3], expected)

    staged, other = new_backend(context.device), _step(context, context.other)
    thread = threading.Thread(target=serve)
    thread.start()
    captures = 0
    try:
        for _ in range(max(3, context.scale.rounds // 10)):
            staged.capture(other.function, other.static).instantiate(other.static).close()
            captures += 1
    finally:
        stop.set()
        thread.join()
    graph_exec.close()
    return [
        Row("captures beside the replays", captures),
        *spread("step alone", alone_us, "us"),
        *spread("step beside a capture", beside_us, "us"),
        Row("steps with another result", wrong, f"of {len(beside_us)}", target="0", met=wrong == 0),
    ]


def failed_capture(context: Context) -> list[Row]:
    """A capture that fails in the middle: what it costs, and whether serving and staging go on."""
    backend, step = new_backend(context.device), _step(context, context.first)
    graph_exec = backend.capture(step.function, step.static).instantiate(step.static)
    _replay(backend, graph_exec)
    expected = step.static[3].clone()
    armed = False

    def fails(tensors: Sequence[torch.Tensor]) -> None:
        step.function(tensors)
        if armed:
            _break(context.device)

    def attempt(candidate: GraphBackend) -> str:
        nonlocal armed
        armed = False
        try:
            graph = candidate.capture(fails, step.static)
            armed = True
            # CUDA captures when it instantiates; the tape has recorded already, so it is asked to record again.
            graph.instantiate(step.static).close()
            candidate.capture(fails, step.static)
        except CaptureError as error:
            return str(error)
        return ""

    attempt(backend)
    before = used_bytes(context.device)
    said = ""
    for _ in range(5):
        said = attempt(backend)
    lost = used_bytes(context.device) - before
    _replay(backend, graph_exec)
    serves = torch.equal(step.static[3], expected)
    staged = new_backend(context.device)
    staged.capture(step.function, step.static).instantiate(step.static).close()
    reason = taint.PROCESS.reason or "not tainted"
    return [
        Row("the capture is refused", said[:200], target="not empty", met=bool(said)),
        Row("the replay before it still gives the same", str(serves), target="True", met=serves),
        Row("memory lost by 5 failed captures", round(lost / _MIB, 2), "MiB"),
        Row("process", reason),
    ]


def _break(device: torch.device) -> None:
    """What a capture does not survive: on a GPU a wait inside it, elsewhere any error."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    raise RuntimeError("broken in the middle")
