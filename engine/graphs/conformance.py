"""The conformance suite of graph backends: what every one of them must do, as functions that assert it.

``tests/conformance/test_engine_graphs.py`` runs it under pytest on every backend the machine has, and
``tests/gpu/run.py`` on a GPU host, where there may be no pytest. Only graphs of one topology are instantiated,
so that a compiling backend compiles once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import torch

from engine.errors import CaptureError
from engine.graphs.port import GraphExec, reproduces
from engine.graphs.result import UpdateResult
from engine.graphs.testing import (
    Beside,
    Subject,
    Tensors,
    capture,
    eager,
    make,
    refused,
    replays_like_eager,
    run,
    same,
    variants,
)

_ROUNDS = 40
CASES: list[Callable[[Subject], None]] = []


def _case(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
    CASES.append(function)
    return function


@_case
def _capture_leaves_the_eager_result(subject: Subject) -> None:
    weight, static = make(subject.device)
    expected = eager(weight, static)
    capture(subject.new(), weight, static)
    assert same(expected, static)


@_case
def _replay_follows_every_new_input(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    for seed in range(1, 4):
        _, fresh = make(subject.device, seed)
        static[0].copy_(fresh[0])
        static[1].fill_(seed)
        replays_like_eager(backend, graph_exec, weight, static)


@_case
def _the_cache_is_written_in_place_and_only_where_told(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    static[2].zero_()
    address = static[2].data_ptr()
    static[1].fill_(3)
    run(backend, graph_exec)
    assert static[2].data_ptr() == address
    assert static[2].ne(0).any(1).tolist() == [False, False, False, True]


@_case
def _constants_are_not_copied(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    weight.mul_(2)
    replays_like_eager(backend, graph_exec, weight, static)


@_case
def _rebinding_runs_nothing_and_moves_to_the_new_addresses(subject: Subject) -> None:
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


@_case
def _binding_to_other_tensors_is_refused(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph = capture(backend, weight, static)
    for wrong in (torch.zeros(5, 8), torch.zeros(8, 4).t(), torch.zeros(4, 8, dtype=torch.float64)):
        with refused("static tensor 2"):
            graph.instantiate([static[0], static[1], wrong.to(subject.device), static[3]])
    with refused("3 static tensors"):
        graph.instantiate(static[:3])


@_case
def _signature_tells_topology_and_nothing_else(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    signature = capture(backend, weight, static).signature
    weight_2, static_2 = make(subject.device, 7)
    assert capture(subject.new(), weight_2, static_2).signature == signature
    others = {backend.capture(function, static).signature for function in variants(weight).values()}
    assert len(others | {signature}) == len(variants(weight)) + 1


@_case
def _update_runs_another_graph_at_the_same_addresses(subject: Subject) -> None:
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


@_case
def _a_rejected_update_leaves_the_exec_as_it_was(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    for expected, function in variants(weight).items():
        assert graph_exec.update(backend.capture(function, static)) is expected
        replays_like_eager(backend, graph_exec, weight, static)


@_case
def _update_refuses_what_it_cannot_judge(subject: Subject) -> None:
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


def _read_fact(tensors: Tensors) -> None:
    if tensors[0].is_set_to(tensors[3]):
        tensors[3].zero_()


def _hidden_in_a_composite(tensors: Tensors) -> None:
    # As many rows as a value says; the operation itself has no tag that tells.
    torch.repeat_interleave(tensors[0], tensors[1], dim=0)


def _draw(tensors: Tensors) -> None:
    tensors[3].copy_(torch.rand(3, 8, device=tensors[3].device))


def _drop(tensors: Tensors) -> None:
    tensors[3].copy_(torch.nn.functional.dropout(tensors[0]))


def _dynamic_shape(tensors: Tensors) -> None:
    tensors[3].nonzero()


def _raise(tensors: Tensors) -> None:
    (tensors[0] @ tensors[0]).sum()


_REFUSED = (_read_back, _read_truth, _read_fact, _hidden_in_a_composite, _draw, _drop, _dynamic_shape, _raise)


@_case
def _what_cannot_be_replayed_is_refused(subject: Subject) -> None:
    backend, (_, static) = subject.new(), make(subject.device)
    for function in _REFUSED:
        with refused():
            backend.capture(function, static)


@_case
def _hidden_state_is_refused(subject: Subject) -> None:
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


@_case
def _a_failed_capture_leaves_nothing(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    made: list[weakref.ref[torch.Tensor]] = []

    def fails(tensors: Tensors) -> None:
        h = tensors[0] @ weight
        made.append(weakref.ref(h))
        raise RuntimeError("boom")

    held: CaptureError | None = None
    gc.disable()
    try:
        backend.capture(fails, static)
    except CaptureError as error:
        held = error
    finally:
        gc.enable()
    # Not even while somebody holds the error.
    assert "boom" in str(held)
    assert [ref() for ref in made] == [None]
    # And the backend still works.
    replays_like_eager(backend, capture(backend, weight, static).instantiate(static), weight, static)


@_case
def _closing_releases_tensors_without_a_collection(subject: Subject) -> None:
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


@_case
def _an_update_releases_what_it_replaced(subject: Subject) -> None:
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


@_case
def _launches_are_done_after_waiting(subject: Subject) -> None:
    backend, (weight, static) = subject.new(), make(subject.device)
    graph_exec = capture(backend, weight, static).instantiate(static)
    with backend.stream():
        graph_exec.replay()
    launch = backend.launched()
    backend.wait()
    assert launch.done()


@_case
def _two_generations_replay_from_two_threads(subject: Subject) -> None:
    def generation(seed: int) -> Callable[[], None]:
        backend, (weight, static) = subject.new(), make(subject.device, seed)
        graph_exec = capture(backend, weight, static).instantiate(static)
        return partial(replays_like_eager, backend, graph_exec, weight, static)

    first, second = generation(1), generation(2)
    with Beside(first):
        for _ in range(_ROUNDS):
            second()


@_case
def _capture_while_another_generation_replays(subject: Subject) -> None:
    serving, (weight, static) = subject.new(), make(subject.device, 1)
    serves = capture(serving, weight, static).instantiate(static)
    staged, (weight_2, static_2) = subject.new(), make(subject.device, 2)
    with Beside(partial(replays_like_eager, serving, serves, weight, static)):
        for _ in range(_ROUNDS):
            graph_exec = capture(staged, weight_2, static_2).instantiate(static_2)
            replays_like_eager(staged, graph_exec, weight_2, static_2)
            graph_exec.close()


@_case
def _update_while_replaying_is_seen_whole(subject: Subject) -> None:
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

    with Beside(either):
        for number in range(_ROUNDS):
            assert graph_exec.update(graphs[number % 2]) is UpdateResult.SUCCESS
