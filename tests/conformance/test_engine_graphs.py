"""What every graph backend must do, on every backend this machine can run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

from engine.errors import CaptureError
from engine.graphs.port import GraphBackend
from engine.graphs.select import new_backend

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
Tensors = Sequence[torch.Tensor]


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(str(request.param))


@pytest.fixture
def backend(device: torch.device) -> GraphBackend:
    return new_backend(device)


def make(device: torch.device, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A weight matrix, and static tensors: input, row to write, cache, output."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 8, generator=generator).to(device)
    static = [torch.randn(3, 8, generator=generator), torch.tensor([1]), torch.zeros(4, 8), torch.zeros(3, 8)]
    return weight, [tensor.to(device) for tensor in static]


def step(weight: torch.Tensor, tensors: Tensors) -> None:
    """A bit of everything a model does: matmul, views, split, in-place write to a cache, attention over it."""
    x, row, cache, out = tensors
    first, second = torch.nn.functional.linear(x, weight).chunk(2, dim=1)
    h = torch.cat((second, first), dim=1)
    cache.index_put_((row,), h[:1])
    scores = (h @ cache.t()).softmax(1)
    out.copy_(torch.nn.functional.silu(scores @ cache) + h.view(-1).view(3, 8))


def run(backend: GraphBackend, graph_exec: object) -> None:
    with backend.stream():
        graph_exec.replay()  # type: ignore[attr-defined]
        backend.wait()


def eager(weight: torch.Tensor, static: Tensors) -> list[torch.Tensor]:
    copies = [tensor.clone() for tensor in static]
    with torch.no_grad():
        step(weight, copies)
    return copies


def test_capture_leaves_the_eager_result(backend: GraphBackend, device: torch.device) -> None:
    weight, static = make(device)
    expected = eager(weight, static)
    backend.capture(lambda tensors: step(weight, tensors), static)
    assert all(torch.equal(*pair) for pair in zip(static, expected, strict=True))


def test_replay_equals_eager_to_the_bit_for_every_new_input(backend: GraphBackend, device: torch.device) -> None:
    weight, static = make(device)
    graph = backend.capture(lambda tensors: step(weight, tensors), static)
    graph_exec = graph.instantiate(static)
    for seed in range(1, 4):
        _, fresh = make(device, seed)
        static[0].copy_(fresh[0])
        static[1].fill_(seed)
        expected = eager(weight, static)
        run(backend, graph_exec)
        assert all(torch.equal(*pair) for pair in zip(static, expected, strict=True))


def test_the_cache_is_written_in_place_and_only_where_told(backend: GraphBackend, device: torch.device) -> None:
    weight, static = make(device)
    graph_exec = backend.capture(lambda tensors: step(weight, tensors), static).instantiate(static)
    static[2].zero_()
    address = static[2].data_ptr()
    static[1].fill_(3)
    run(backend, graph_exec)
    assert static[2].data_ptr() == address
    assert static[2].ne(0).any(1).tolist() == [False, False, False, True]


def test_rebinding_runs_nothing_and_moves_to_the_new_addresses(backend: GraphBackend, device: torch.device) -> None:
    weight, static = make(device)
    graph = backend.capture(lambda tensors: step(weight, tensors), static)
    graph.instantiate(static).close()
    _, other = make(device, 5)
    untouched = [tensor.clone() for tensor in other]
    graph_exec = graph.instantiate(other)
    backend.wait()
    assert all(torch.equal(*pair) for pair in zip(other, untouched, strict=True))
    before = [tensor.clone() for tensor in static]
    expected = eager(weight, other)
    run(backend, graph_exec)
    assert all(torch.equal(*pair) for pair in zip(other, expected, strict=True))
    assert all(torch.equal(*pair) for pair in zip(static, before, strict=True))


def test_binding_to_other_shapes_is_refused(backend: GraphBackend, device: torch.device) -> None:
    weight, static = make(device)
    graph = backend.capture(lambda tensors: step(weight, tensors), static)
    for wrong in (torch.zeros(5, 8), torch.zeros(8, 4).t(), torch.zeros(4, 8, dtype=torch.float64)):
        with pytest.raises(CaptureError):
            graph.instantiate([static[0], static[1], wrong.to(device), static[3]])


def test_signature_tells_topology_and_nothing_else(backend: GraphBackend, device: torch.device) -> None:
    def signature(seed: int, function: object = step, width: int = 3) -> str:
        weight, static = make(device, seed)
        if width != 3:
            static[0], static[3] = static[0][:width].clone(), static[3][:width].clone()
        return backend.capture(lambda tensors: function(weight, tensors), static).signature  # type: ignore[operator]

    def other_flow(weight: torch.Tensor, tensors: Tensors) -> None:
        x, _, cache, out = tensors
        out.copy_(x @ weight + cache[:3])

    def other_constant(weight: torch.Tensor, tensors: Tensors) -> None:
        x, _, cache, out = tensors
        out.copy_(x @ weight + cache[1:4])

    def narrow(weight: torch.Tensor, tensors: Tensors) -> None:
        x, _, cache, out = tensors
        out.copy_(x @ weight + cache[: x.shape[0]])

    assert signature(0) == signature(7)
    found = [signature(0), signature(0, other_flow), signature(0, other_constant), signature(0, narrow, 2)]
    assert len(set(found)) == len(found)


def read_back(tensors: Tensors) -> None:
    if float(tensors[0].sum()) > 0:
        tensors[3].zero_()


def draw(tensors: Tensors) -> None:
    tensors[3].copy_(torch.rand(3, 8, device=tensors[3].device))


def dynamic_shape(tensors: Tensors) -> None:
    tensors[3].nonzero()


def raises(tensors: Tensors) -> None:
    (tensors[0] @ tensors[0]).sum()


@pytest.mark.parametrize("function", [read_back, draw, dynamic_shape, raises])
def test_what_cannot_be_replayed_is_refused(backend: GraphBackend, device: torch.device, function: object) -> None:
    _, static = make(device)
    with pytest.raises(CaptureError):
        backend.capture(function, static)  # type: ignore[arg-type]


def test_hidden_state_is_refused(backend: GraphBackend, device: torch.device) -> None:
    weight, static = make(device)
    view = static[2][:1]
    with pytest.raises(CaptureError, match="not static"):
        backend.capture(lambda tensors: weight.add_(tensors[0][0]), static)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="alias"):
        backend.capture(lambda tensors: tensors[3].add_(view), static)  # type: ignore[arg-type]


def test_a_failed_capture_leaves_nothing(backend: GraphBackend, device: torch.device) -> None:
    weight, static = make(device)
    made: list[weakref.ref[torch.Tensor]] = []

    def fails(tensors: Tensors) -> None:
        made.append(weakref.ref(tensors[0] @ weight))
        raise RuntimeError("boom")

    with pytest.raises(CaptureError, match="boom"):
        backend.capture(fails, static)
    gc.collect()
    assert [ref() for ref in made] == [None]
    # And the backend still works.
    graph_exec = backend.capture(lambda tensors: step(weight, tensors), static).instantiate(static)
    expected = eager(weight, static)
    run(backend, graph_exec)
    assert torch.equal(static[3], expected[3])


def test_closing_releases_static_tensors_without_a_collection(backend: GraphBackend, device: torch.device) -> None:
    weight, static = make(device)
    graph_exec = backend.capture(lambda tensors: step(weight, tensors), static).instantiate(static)
    run(backend, graph_exec)
    cache = weakref.ref(static[2])
    gc.disable()
    try:
        graph_exec.close()
        static.clear()
        assert cache() is None
    finally:
        gc.enable()


def test_intermediates_are_dropped_after_their_last_use() -> None:
    from engine.graphs.tape import TapeBackend

    weight, static = make(torch.device("cpu"))
    graph_exec = TapeBackend().capture(lambda tensors: step(weight, tensors), static).instantiate(static)
    held = graph_exec.held
    graph_exec.replay()
    assert graph_exec.held == held
