"""What the CUDA backend asks of the driver, on a simulated device; its result codes and the taint rule."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytest
import torch

from engine.errors import CaptureError
from engine.graphs import cuda
from engine.graphs.cuda import CudaBackend, result_of
from engine.graphs.result import UpdateResult
from engine.graphs.simulated import SimulatedDriver, SimulatedPool
from engine.graphs.taint import Taint, lost_pool
from engine.graphs.testing import capture, make, replays_like_eager, run

CPU = torch.device("cpu")


@pytest.fixture
def driver() -> SimulatedDriver:
    return SimulatedDriver()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Taint:
    """A process that is not tainted by other tests."""
    fresh = Taint()
    monkeypatch.setattr(cuda, "PROCESS", fresh)
    return fresh


def pool_of(backend: CudaBackend) -> SimulatedPool:
    pool: SimulatedPool = backend._pool
    return pool


def test_our_codes_are_cudas() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    names = {
        UpdateResult.SUCCESS: "cudaGraphExecUpdateSuccess",
        UpdateResult.ERROR: "cudaGraphExecUpdateError",
        UpdateResult.TOPOLOGY_CHANGED: "cudaGraphExecUpdateErrorTopologyChanged",
        UpdateResult.NODE_TYPE_CHANGED: "cudaGraphExecUpdateErrorNodeTypeChanged",
        UpdateResult.FUNCTION_CHANGED: "cudaGraphExecUpdateErrorFunctionChanged",
        UpdateResult.PARAMETERS_CHANGED: "cudaGraphExecUpdateErrorParametersChanged",
        UpdateResult.NOT_SUPPORTED: "cudaGraphExecUpdateErrorNotSupported",
        UpdateResult.UNSUPPORTED_FUNCTION_CHANGE: "cudaGraphExecUpdateErrorUnsupportedFunctionChange",
        UpdateResult.ATTRIBUTES_CHANGED: "cudaGraphExecUpdateErrorAttributesChanged",
    }
    assert {code.value: name for code, name in names.items()} == {
        code.value: code.name for code in runtime.cudaGraphExecUpdateResult
    }


def test_the_vendor_calls_exist_with_the_arguments_we_pass() -> None:
    runtime = importlib.import_module("cuda.bindings.runtime") if importlib.util.find_spec("cuda") else None
    if runtime is not None:
        assert "cudaGraphExecUpdate(hGraphExec, hGraph)" in runtime.cudaGraphExecUpdate.__doc__
        assert callable(runtime.cudaGetLastError)
        runtime.cudaGraphExec_t(init_value=1)
        runtime.cudaGraph_t(init_value=1)
    for name in ("capture_begin", "capture_end", "replay", "reset", "raw_cuda_graph", "raw_cuda_graph_exec"):
        assert callable(getattr(torch.cuda.CUDAGraph, name))
    for name in ("id", "use_count"):
        assert hasattr(torch.cuda.MemPool, name)
    for name in ("wait_stream", "synchronize"):
        assert callable(getattr(torch.cuda.Stream, name))


@pytest.mark.parametrize("code", range(9))
def test_every_code_of_the_driver_comes_out_typed_and_a_refusal_changes_nothing(
    driver: SimulatedDriver, code: int
) -> None:
    backend, (weight, static) = CudaBackend(driver), make(CPU)
    graph_exec = capture(backend, weight, static).instantiate(static)
    weight_2, _ = make(CPU, 3)
    graph_2 = capture(backend, weight_2, static)
    users = pool_of(backend).users
    driver.update_result = code
    result = graph_exec.update(graph_2)
    assert result is UpdateResult(code)
    replays_like_eager(backend, graph_exec, weight if code else weight_2, static)
    assert pool_of(backend).users == users + (not code)


def test_an_update_takes_memory_of_the_exec_it_updates(driver: SimulatedDriver) -> None:
    backend, other, (weight, static) = CudaBackend(driver), CudaBackend(driver), make(CPU)
    graph_exec = capture(backend, weight, static).instantiate(static)
    assert graph_exec.update(capture(other, make(CPU, 3)[0], static)) is UpdateResult.SUCCESS
    assert (pool_of(backend).users, pool_of(other).users) == (3, 1)


def test_a_code_of_a_later_cuda_is_an_error() -> None:
    assert result_of(99) is UpdateResult.ERROR


def test_captures_share_a_pool_and_give_it_back(driver: SimulatedDriver) -> None:
    backend, (weight, static) = CudaBackend(driver), make(CPU)
    pool, graph = pool_of(backend), capture(backend, weight, static)
    first, second = graph.instantiate(static), graph.instantiate(static)
    assert first.update(graph) is UpdateResult.SUCCESS
    assert first.update(graph) is UpdateResult.SUCCESS
    assert pool.users == 4
    first.close()
    assert pool.users == 2
    second.close()
    assert pool.users == 1
    # The pool is kept while the backend is: the last graph gone, another can be captured.
    graph.instantiate(static).close()
    backend.close()
    assert driver.captures_open == 0


@pytest.mark.parametrize("at_end", [False, True])
def test_a_failed_capture_ends_it_and_gives_the_pool_back(
    driver: SimulatedDriver, process: Taint, at_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    backend, (weight, static) = CudaBackend(driver), make(CPU)
    fail = False

    def sometimes(tensors: Sequence[torch.Tensor]) -> None:
        tensors[3].copy_(tensors[0] @ weight)
        if fail:
            raise RuntimeError("boom")

    graph = backend.capture(sometimes, static)
    before = [tensor.clone() for tensor in static]
    fail, driver.capture_error = not at_end, "boom" if at_end else None
    with pytest.raises(CaptureError, match="boom"):
        graph.instantiate(static)
    assert (driver.captures_open, pool_of(backend).users) == (0, 1)
    assert all(torch.equal(*pair) for pair in zip(static, before, strict=True))
    assert process.reason is None
    fail, driver.capture_error = False, None
    run(backend, graph.instantiate(static))


def test_a_lost_pool_taints_the_process(driver: SimulatedDriver, process: Taint) -> None:
    driver.loses_pools, driver.capture_error = True, "boom"
    backend, (weight, static) = CudaBackend(driver), make(CPU)
    with pytest.raises(CaptureError, match="memory pool"):
        capture(backend, weight, static).instantiate(static)
    assert process.reason is not None
    assert "hand over" in process.reason


def test_an_update_that_cannot_be_captured_leaves_the_exec_as_it_was(driver: SimulatedDriver, process: Taint) -> None:
    backend, (weight, static) = CudaBackend(driver), make(CPU)
    graph_exec = capture(backend, weight, static).instantiate(static)
    graph = capture(backend, make(CPU, 3)[0], static)
    driver.capture_error = "boom"
    with pytest.raises(CaptureError, match="boom"):
        graph_exec.update(graph)
    replays_like_eager(backend, graph_exec, weight, static)


@pytest.mark.parametrize(
    ("version", "after", "lost"),
    [
        ("2.9.1+cu130", 1, True),
        ("2.13.0", 1, True),
        ("2.14.0", 1, False),
        ("2.15.0+cu132", 1, False),
        ("3.0.0", 1, False),
        ("2.15.0", 2, True),
        ("unknown", 1, True),
    ],
)
def test_taint_rule(version: str, after: int, lost: bool) -> None:
    assert (lost_pool(version, uses_before=1, uses_after=after) is not None) is lost


def test_taint_keeps_its_first_reason() -> None:
    process = Taint()
    process.mark("first")
    process.mark("second")
    assert process.reason == "first: hand over to a fresh process"


def test_a_launch_is_done_when_its_event_is(driver: SimulatedDriver) -> None:
    backend, (weight, static) = CudaBackend(driver), make(CPU)
    graph_exec = capture(backend, weight, static).instantiate(static)
    with backend.stream():
        graph_exec.replay()
    launch = backend.launched()
    done = []
    for busy in (True, False):
        driver.busy = busy
        done.append(launch.done())
    assert done == [False, True]
