"""Helpers of the conformance suite of graph backends (:mod:`engine.graphs.conformance`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from engine.errors import CaptureError
from engine.graphs.port import Captured, Graph, GraphBackend, GraphExec, reproduces
from engine.graphs.result import UpdateResult

Tensors = Sequence[torch.Tensor]
_JOIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of backend on a device; ``new`` makes the backend of one generation."""

    new: Callable[[], GraphBackend]
    device: torch.device


@contextmanager
def refused(match: str = "") -> Iterator[None]:
    """Asserts that the block ends in a :class:`CaptureError` whose message contains ``match``."""
    said = None
    try:
        yield
    except CaptureError as error:
        said = str(error)
    assert said is not None, "not refused"
    assert match in said, said


def make(device: torch.device, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A weight matrix, and static tensors: input, row to write, cache, output."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 8, generator=generator).to(device)
    static = [torch.randn(3, 8, generator=generator), torch.tensor([1]), torch.zeros(4, 8), torch.zeros(3, 8)]
    return weight, [tensor.to(device) for tensor in static]


def _look(h: torch.Tensor) -> torch.Tensor:
    return h.view(3, 8)


def step(
    weight: torch.Tensor,
    tensors: Tensors,
    *,
    activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu,
    look: Callable[[torch.Tensor], torch.Tensor] = _look,
    first: int = 0,
) -> None:
    """A bit of everything a model does, and of what is easy to get wrong.

    Matmul, views, chunk, an in-place write to a cache, attention over it, and a ``reshape`` that has to copy: a
    backend that takes it for a view of the static input never sees another input.
    """
    x, row, cache, out = tensors
    left, right = functional.linear(x, weight).chunk(2, dim=1)
    h = torch.cat((right, left), dim=1)
    cache.index_put_((row,), h[first : first + 1])
    scores = (h @ cache.t()).softmax(1)
    out.copy_(activation(scores @ cache) + look(h) + x.t().reshape(3, 8))


def _other_flow(weight: torch.Tensor, tensors: Tensors) -> None:
    x, _, cache, out = tensors
    out.copy_(x @ weight + cache[:3])


def variants(weight: torch.Tensor) -> dict[UpdateResult, Captured]:
    """A function whose graph cannot stand in for that of :func:`step`, for each reason a recording can tell."""
    # Equal to arithmetic, another tensor to a kernel.
    restrided = weight.t().contiguous().t()
    return {
        UpdateResult.TOPOLOGY_CHANGED: partial(_other_flow, weight),
        UpdateResult.NODE_TYPE_CHANGED: partial(step, weight, look=torch.neg),
        UpdateResult.FUNCTION_CHANGED: partial(step, weight, activation=functional.relu),
        UpdateResult.ATTRIBUTES_CHANGED: partial(step, restrided),
        UpdateResult.PARAMETERS_CHANGED: partial(step, weight, first=1),
    }


def eager(weight: torch.Tensor, static: Tensors) -> list[torch.Tensor]:
    """What ``static`` holds after one step without graphs."""
    copies = [tensor.clone() for tensor in static]
    with torch.inference_mode():
        step(weight, copies)
    return copies


def run(backend: GraphBackend, graph_exec: GraphExec) -> None:
    """Replay and wait."""
    _settle()
    with backend.stream():
        graph_exec.replay()
        backend.wait()


def _settle() -> None:
    """What this thread's stream has written is there for other streams."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def capture(backend: GraphBackend, weight: torch.Tensor, static: Tensors) -> Graph:
    """Capture :func:`step`."""
    return backend.capture(partial(step, weight), static)


def same(expected: Tensors, found: Tensors, tolerance: float = 0.0) -> bool:
    """True when all tensors agree to the backend's tolerance."""
    return all(reproduces(*pair, tolerance) for pair in zip(expected, found, strict=True))


def replays_like_eager(backend: GraphBackend, graph_exec: GraphExec, weight: torch.Tensor, static: Tensors) -> None:
    """Asserts that a replay does to ``static`` what an eager step with ``weight`` would."""
    _settle()
    with backend.stream():
        expected = eager(weight, static)
        graph_exec.replay()
        backend.wait()
    assert same(expected, static, backend.tolerance)


class Beside:
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
        except BaseException as error:
            self._failure = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure
