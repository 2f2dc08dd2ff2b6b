"""What only the tape promises: no intermediates kept, no reference cycles, no compiler imported."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import CaptureError
from engine.graphs.binding import _asks_for, quickest
from engine.graphs.record import record
from engine.graphs.tape import TapeBackend
from engine.graphs.testing import capture, eager, make, same, step
from engine.graphs.topology import Kind

CPU = torch.device("cpu")
Tensors = Sequence[torch.Tensor]


class LiveResults(TorchDispatchMode):
    """Counts tensors that operations made and that are still alive, before each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.most = max(self.most, sum(made() is not None for made in self._made))
        result = func(*args, **(kwargs or {}))
        self._made.append(weakref.ref(result))
        return result


def test_intermediates_are_dropped_after_their_last_use() -> None:
    def chain(tensors: Tensors) -> None:
        x = tensors[0]
        for _ in range(10):
            x = x + 1
        tensors[0].copy_(x)

    static = [torch.zeros(4)]
    graph_exec = TapeBackend().capture(chain, static).instantiate(static)
    held = graph_exec.held
    with LiveResults() as live:
        graph_exec.replay()
    assert static[0].tolist() == [20.0] * 4
    assert live.most == 1
    assert graph_exec.held == held == 1


def test_a_list_of_one_result_is_still_a_list() -> None:
    def one(tensors: Tensors) -> None:
        (view,) = tensors[0].chunk(1)
        (made,) = (tensors[0] + 1).chunk(1)
        tensors[0].copy_(view + made)

    static = [torch.ones(4)]
    graph_exec = TapeBackend().capture(one, static).instantiate(static)
    static[0].fill_(2)
    graph_exec.replay()
    assert static[0].tolist() == [5.0] * 4


def test_a_failing_replay_keeps_nothing_and_can_be_repeated() -> None:
    weight, static = make(CPU)
    graph_exec = TapeBackend().capture(partial(step, weight), static).instantiate(static)
    held = graph_exec.held
    static[1].fill_(99)
    with pytest.raises(IndexError):
        graph_exec.replay()
    assert graph_exec.held == held
    static[1].fill_(2)
    expected = eager(weight, static)
    graph_exec.replay()
    assert same(expected, static)


def test_nothing_is_left_to_the_cycle_collector() -> None:
    backend, (weight, static) = TapeBackend(), make(CPU)
    gc.collect()
    gc.disable()
    try:
        graph = capture(backend, weight, static)
        graph_exec = graph.instantiate(static)
        graph_exec.replay()
        graph_exec.update(capture(backend, weight, static))
        with pytest.raises(CaptureError):
            backend.capture(lambda tensors: tensors[0].nonzero(), static)  # type: ignore[arg-type]
        graph_exec.close()
        del graph, graph_exec
        found = [thing for thing in _cyclic_garbage() if type(thing).__module__.startswith(("engine", "torch"))]
    finally:
        gc.enable()
    assert found == []


def _cyclic_garbage() -> list[object]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_views_of_fixed_memory_are_made_once_and_copies_are_not_taken_for_views() -> None:
    weight, static = make(CPU)
    recording = record(partial(step, weight), static)
    kinds = {str(call.op): call.kind for call in recording.topology.calls}
    assert kinds["aten.reshape.default"] is Kind.COMPUTE
    assert kinds["aten.t.default"] is Kind.VIEW
    program = TapeBackend().capture(partial(step, weight), static).program
    assert [function.__name__ for function, *_ in program.once].count("t") == 2
    assert "t" not in [getattr(function, "__name__", "") for function, *_ in program.every]


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (torch.ops.aten.add.Tensor, (torch.ones(2), torch.ones(2)), {}),
        (torch.ops.aten.add.Tensor, (torch.ones(2), torch.ones(2)), {"alpha": 2}),
        (torch.ops.aten.mul.Scalar, (torch.ones(2), 3.0), {}),
        (torch.ops.aten.mul.Tensor, (torch.ones(2), torch.ones(())), {}),
        (torch.ops.aten.slice.Tensor, (torch.ones(4), 0, 1, 3), {}),
        (torch.ops.aten.copy_.default, (torch.ones(2), torch.ones(2)), {}),
        (torch.ops.aten.cat.default, ([torch.ones(2, 1), torch.ones(2, 1)], 1), {}),
        (torch.ops.aten.linear.default, (torch.ones(2, 3), torch.ones(4, 3)), {}),
        (torch.ops.aten.sum.dim_IntList, (torch.ones(2, 3), [0]), {"dtype": torch.float64}),
    ],
    ids=str,
)
def test_a_quicker_call_asks_for_the_very_same_operation(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    asked: list[Any] = []

    class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append((func, len(args), kwargs or {}))
            return func(*args, **(kwargs or {}))

    with torch.inference_mode():
        result = op(*args, **kwargs)
        call = quickest(op, args, kwargs, result)
        with Asked():  # type: ignore[no-untyped-call]
            found = call(*args, **kwargs)
    assert asked == [(op, len(args), kwargs)]
    assert torch.equal(found, result)


def test_a_call_that_would_pick_another_overload_is_not_taken() -> None:
    with torch.inference_mode():
        # `torch.mul(tensor, number)` asks for mul.Tensor, with the number wrapped.
        args = (torch.ones(2), 3.0)
        call = quickest(torch.ops.aten.mul.Scalar, args, {}, torch.ones(2))
    assert call is torch.ops.aten.mul.Scalar


@pytest.mark.parametrize(
    "call",
    [
        lambda left, right: torch.sub(right, left),
        lambda left, right: torch.sub(left, right, alpha=2),
        lambda left, right: torch.sub(left, right).neg(),
        lambda left, right: left,
        torch.add,
    ],
)
def test_a_call_that_asks_for_anything_else_is_not_taken(call: Callable[..., Any]) -> None:
    left, right, result = torch.ones(2), torch.ones(2), torch.zeros(2)
    with torch.inference_mode():
        assert _asks_for(torch.sub, torch.ops.aten.sub.Tensor, (left, right), {}, result)
        assert not _asks_for(call, torch.ops.aten.sub.Tensor, (left, right), {}, result)


def test_the_compiler_is_never_imported() -> None:
    code = (
        "import sys, torch\n"
        "from engine.graphs.select import new_backend\n"
        "from engine.graphs.testing import capture, make\n"
        "weight, static = make(torch.device('cpu'))\n"
        "capture(new_backend(torch.device('cpu')), weight, static).instantiate(static).replay()\n"
        "import engine.graphs.aoti\n"
        "loaded = [name for name in sys.modules if name.startswith(('torch._inductor', 'torch._dynamo'))]\n"
        "assert not loaded, loaded[:5]\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env={"PATH": "/usr/bin:/bin"}, timeout=120)
