"""The conformance suite of graph backends: what every one of them must do, as functions that assert it.

``tests/conformance/test_engine_graphs.py`` runs it under pytest on every backend the machine has;
``tests/gpu/run.py`` runs it on a GPU host, where there may be no pytest. Every case captures :func:`step`, so
that a compiling backend compiles once; cases in :data:`UNCOMPILED` capture more but instantiate nothing else.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from engine.errors import CaptureError
from engine.graphs.port import Captured, Graph, GraphBackend, GraphExec, UpdateResult, reproduces

Tensors = Sequence[torch.Tensor]
_ROUNDS = 40
_JOIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of backend on a device; ``new`` makes the backend of one generation."""

    new: Callable[[], GraphBackend]
    device: torch.device


@contextmanager
def refused(match: str = "") -> Iterator[None]:
    """Asserts that the block ends in a :class:`CaptureError` whose message contains ``match``."""
    try:
        yield
    except CaptureError as error:
        assert match in str(error), error
        return
    raise AssertionError("not refused")


def make(device: torch.device, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A weight matrix, and static tensors: input, row to write, cache, output."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 8, generator=generator).to(device)
    static = [torch.randn(3, 8, generator=generator), torch.tensor([1]), torch.zeros(4, 8), torch.zeros(3, 8)]
    return weight, [tensor.to(device) for tensor in static]


def step(weight: torch.Tensor, tensors: Tensors) -> None:
    """A bit of everything a model does, and of what is easy to get wrong.

    Matmul, views, chunk, an in-place write to a cache, attention over it, and a ``reshape`` that has to copy: a
    backend that takes it for a view of the static input never sees another input.
    """
    x, row, cache, out = tensors
    first, second = torch.nn.functional.linear(x, weight).chunk(2, dim=1)
    h = torch.cat((second, first), dim=1)
    cache.index_put_((row,), h[:1])
    scores = (h @ cache.t()).softmax(1)
    turned = x.t().reshape(3, 8)
    out.copy_(torch.nn.functional.silu(scores @ cache) + h.view(-1).view(3, 8) + turned)


def eager(weight: torch.Tensor, static: Tensors) -> list[torch.Tensor]:
    """What ``static`` holds after one step without graphs."""
    copies = [tensor.clone() for tensor in static]
    with torch.inference_mode():
        step(weight, copies)
    return copies


def run(backend: GraphBackend, graph_exec: GraphExec) -> None:
    """Replay and wait."""
    with backend.stream():
        graph_exec.replay()
        backend.wait()


def capture(backend: GraphBackend, weight: torch.Tensor, static: Tensors) -> Graph:
    """Capture :func:`step`."""
    return backend.capture(partial(step, weight), static)


def same(expected: Tensors, found: Tensors, tolerance: float = 0.0) -> bool:
    """True when all tensors agree to the backend's tolerance."""
    return all(reproduces(*pair, tolerance) for pair in zip(expected, found, strict=True))


def replays_like_eager(backend: GraphBackend, graph_exec: GraphExec, weight: torch.Tensor, static: Tensors) -> None:
    """Asserts that a replay does to ``static`` what an eager step with ``weight`` would."""
    expected = eager(weight, static)
    run(backend, graph_exec)
    assert same(expected, static, backend.tolerance)


def test_capture_leaves_the_eager_result(subject: Subject) -> None:
    weight, static = make(subject.device)
    expected = eager(weight, static)
    capture(subject.new(), weight, static)
    assert same(expected, static)


def test_replay_follows_every_new_input(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    for seed in range(1, 4):
        _, fresh = make(subject.device, seed)
        static[0].copy_(fresh[0])
        static[1].fill_(seed)
        replays_like_eager(backend, graph_exec, weight, static)


def test_the_cache_is_written_in_place_and_only_where_told(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    static[2].zero_()
    address = static[2].data_ptr()
    static[1].fill_(3)
    run(backend, graph_exec)
    assert static[2].data_ptr() == address
    assert static[2].ne(0).any(1).tolist() == [False, False, False, True]


def test_constants_are_not_copied(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    weight.mul_(2)
    replays_like_eager(backend, graph_exec, weight, static)


def test_rebinding_runs_nothing_and_moves_to_the_new_addresses(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph = capture(backend, weight, static)
    graph.instantiate(static).close()
    _, other = make(subject.device, 5)
    untouched = [tensor.clone() for tensor in other]
    graph_exec = graph.instantiate(other)
    backend.wait()
    assert same(untouched, other)
    before = [tensor.clone() for tensor in static]
    replays_like_eager(backend, graph_exec, weight, other)
    assert same(before, static)


def test_binding_to_other_tensors_is_refused(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph = capture(backend, weight, static)
    for wrong in (torch.zeros(5, 8), torch.zeros(8, 4).t(), torch.zeros(4, 8, dtype=torch.float64)):
        with refused("static tensor 2"):
            graph.instantiate([static[0], static[1], wrong.to(subject.device), static[3]])
    with refused("3 static tensors"):
        graph.instantiate(static[:3])


def _other_operation(weight: torch.Tensor, tensors: Tensors) -> None:
    x, row, cache, out = tensors
    first, second = torch.nn.functional.linear(x, weight).chunk(2, dim=1)
    h = torch.cat((second, first), dim=1)
    cache.index_put_((row,), h[:1])
    scores = (h @ cache.t()).softmax(1)
    turned = x.t().reshape(3, 8)
    out.copy_(torch.nn.functional.relu(scores @ cache) + h.view(-1).view(3, 8) + turned)


def _other_parameter(weight: torch.Tensor, tensors: Tensors) -> None:
    x, row, cache, out = tensors
    first, second = torch.nn.functional.linear(x, weight).chunk(2, dim=1)
    h = torch.cat((second, first), dim=1)
    cache.index_put_((row,), h[1:2])
    scores = (h @ cache.t()).softmax(1)
    turned = x.t().reshape(3, 8)
    out.copy_(torch.nn.functional.silu(scores @ cache) + h.view(-1).view(3, 8) + turned)


def _other_kind(weight: torch.Tensor, tensors: Tensors) -> None:
    x, row, cache, out = tensors
    first, second = torch.nn.functional.linear(x, weight).chunk(2, dim=1)
    h = torch.cat((second, first), dim=1)
    cache.index_put_((row,), h[:1])
    scores = (h @ cache.t()).softmax(1)
    turned = x.t().reshape(3, 8)
    out.copy_(torch.nn.functional.silu(scores @ cache) + h.neg().view(3, 8) + turned)


def _other_flow(weight: torch.Tensor, tensors: Tensors) -> None:
    x, _, cache, out = tensors
    out.copy_(x @ weight + cache[:3])


def _half(weight: torch.Tensor) -> torch.Tensor:
    """The same matrix with other strides: another tensor for a kernel, an equal one for arithmetic."""
    return weight.t().contiguous().t()


def variants(weight: torch.Tensor) -> dict[UpdateResult, Captured]:
    """A graph that cannot stand in for :func:`step`, for each reason that a recording can tell."""
    return {
        UpdateResult.TOPOLOGY_CHANGED: partial(_other_flow, weight),
        UpdateResult.NODE_TYPE_CHANGED: partial(_other_kind, weight),
        UpdateResult.FUNCTION_CHANGED: partial(_other_operation, weight),
        UpdateResult.ATTRIBUTES_CHANGED: partial(step, _half(weight)),
        UpdateResult.PARAMETERS_CHANGED: partial(_other_parameter, weight),
    }


def test_signature_tells_topology_and_nothing_else(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    signature = capture(backend, weight, static).signature
    weight_2, static_2 = make(subject.device, 7)
    assert capture(subject.new(), weight_2, static_2).signature == signature
    others = {backend.capture(function, static).signature for function in variants(weight).values()}
    assert len(others | {signature}) == len(variants(weight)) + 1


def test_update_runs_another_graph_at_the_same_addresses(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    other, (weight_2, static_2) = subject.new(), make(subject.device, 3)
    graph_2 = capture(other, weight_2, static_2)
    before = [tensor.clone() for tensor in (*static, *static_2)]
    assert graph_exec.update(graph_2) is UpdateResult.SUCCESS
    backend.wait()
    assert same(before, [*static, *static_2])
    replays_like_eager(backend, graph_exec, weight_2, static)
    assert same(before[len(static) :], static_2)
    # And again: the exec now is what it was updated to.
    assert graph_exec.update(capture(backend, weight, static)) is UpdateResult.SUCCESS
    replays_like_eager(backend, graph_exec, weight, static)


def test_a_rejected_update_leaves_the_exec_as_it_was(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    for expected, function in variants(weight).items():
        assert graph_exec.update(backend.capture(function, static)) is expected
        replays_like_eager(backend, graph_exec, weight, static)


def test_update_refuses_what_it_cannot_judge(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph = capture(backend, weight, static)
    graph_exec = graph.instantiate(static)

    class Foreign:
        signature = graph.signature

        def instantiate(self, static: Tensors) -> GraphExec:
            raise AssertionError(static)

    assert graph_exec.update(Foreign()) is UpdateResult.NOT_SUPPORTED
    graph_exec.close()
    assert graph_exec.update(graph) is UpdateResult.ERROR


def _read_back(tensors: Tensors) -> None:
    if float(tensors[0].sum()) > 0:
        tensors[3].zero_()


def _read_truth(tensors: Tensors) -> None:
    if tensors[1].eq(1):
        tensors[3].zero_()


def _draw(tensors: Tensors) -> None:
    tensors[3].copy_(torch.rand(3, 8, device=tensors[3].device))


def _drop(tensors: Tensors) -> None:
    tensors[3].copy_(torch.nn.functional.dropout(tensors[0]))


def _dynamic_shape(tensors: Tensors) -> None:
    tensors[3].nonzero()


def _raise(tensors: Tensors) -> None:
    (tensors[0] @ tensors[0]).sum()


def test_what_cannot_be_replayed_is_refused(subject: Subject) -> None:
    backend, (_, static) = subject.new(), make(subject.device)
    for function in (_read_back, _read_truth, _draw, _drop, _dynamic_shape, _raise):
        with refused():
            backend.capture(function, static)


def test_hidden_state_is_refused(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    view = static[2][:1]

    def write_constant(tensors: Tensors) -> None:
        weight.view(-1)[:8].add_(tensors[0][0])

    def read_alias(tensors: Tensors) -> None:
        tensors[3].add_(view)

    with refused("not static"):
        backend.capture(write_constant, static)
    with refused("alias"):
        backend.capture(read_alias, static)


def test_a_failed_capture_leaves_nothing(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    made: list[weakref.ref[torch.Tensor]] = []

    def fails(tensors: Tensors) -> None:
        h = tensors[0] @ weight
        made.append(weakref.ref(h))
        raise RuntimeError("boom")

    gc.disable()
    try:
        backend.capture(fails, static)
    except CaptureError as error:
        # Not even while somebody holds the error.
        assert "boom" in str(error)
        assert [ref() for ref in made] == [None]
    else:
        raise AssertionError("not refused")
    finally:
        gc.enable()
    # And the backend still works.
    replays_like_eager(backend, capture(backend, weight, static).instantiate(static), weight, static)


def test_closing_releases_tensors_without_a_collection(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    gc.disable()
    try:
        graph_exec = capture(backend, weight, static).instantiate(static)
        run(backend, graph_exec)
        released = [weakref.ref(static[2]), weakref.ref(weight)]
        graph_exec.close()
        del weight
        static.clear()
        assert [ref() for ref in released] == [None, None]
    finally:
        gc.enable()


def test_an_update_releases_what_it_replaced(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    gc.disable()
    try:
        graph_exec = capture(backend, weight, static).instantiate(static)
        weight_2, _ = make(subject.device, 3)
        assert graph_exec.update(capture(backend, weight_2, static)) is UpdateResult.SUCCESS
        replaced = weakref.ref(weight)
        del weight
        assert replaced() is None
        replays_like_eager(backend, graph_exec, weight_2, static)
    finally:
        gc.enable()


def test_launches_are_done_after_waiting(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    with backend.stream():
        graph_exec.replay()
    launch = backend.launched()
    backend.wait()
    assert launch.done()


class _Beside:
    """Calls a function again and again in another thread, until the block ends; then raises what it raised."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self.rounds = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._function()
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001 - raised again in the other thread
            self._failure = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure


def test_two_generations_replay_from_two_threads(subject: Subject) -> None:
    def generation(seed: int) -> Callable[[], None]:
        backend, (weight, static) = subject.new(), make(subject.device, seed)
        graph_exec = capture(backend, weight, static).instantiate(static)
        return partial(replays_like_eager, backend, graph_exec, weight, static)

    first, second = generation(1), generation(2)
    with _Beside(first):
        for _ in range(_ROUNDS):
            second()


def test_capture_while_another_generation_replays(subject: Subject) -> None:
    serving, (weight, static) = subject.new(), make(subject.device, 1)
    serves = capture(serving, weight, static).instantiate(static)
    staged, (weight_2, static_2) = subject.new(), make(subject.device, 2)
    with _Beside(partial(replays_like_eager, serving, serves, weight, static)):
        for _ in range(_ROUNDS):
            graph_exec = capture(staged, weight_2, static_2).instantiate(static_2)
            replays_like_eager(staged, graph_exec, weight_2, static_2)
            graph_exec.close()


def test_update_while_replaying_is_seen_whole(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device, 1)
    weight_2, _ = make(subject.device, 2)
    graphs = [capture(backend, matrix, static) for matrix in (weight, weight_2)]
    graph_exec = graphs[0].instantiate(static)
    # The step reads nothing that it wrote before, so each weight has one result.
    static[2].zero_()
    allowed = [eager(matrix, static)[3] for matrix in (weight, weight_2)]

    def either() -> None:
        run(backend, graph_exec)
        assert any(reproduces(expected, static[3], backend.tolerance) for expected in allowed)

    with _Beside(either):
        for number in range(_ROUNDS):
            assert graph_exec.update(graphs[number % 2]) is UpdateResult.SUCCESS


CASES: tuple[Callable[[Subject], None], ...] = tuple(
    case for name, case in list(globals().items()) if name.startswith("test_")
)
