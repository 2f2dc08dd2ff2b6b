"""What a graph backend offers; the engine knows no other way to run a model.

The words are CUDA's: *capture* turns a function into a graph, *instantiate* binds a graph to memory
and gives a graph exec, *update* replaces what an exec runs, *replay* launches it. One backend object
serves one generation. Any thread may use one; an exec is replayed by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from engine.graphs.result import UpdateResult

# Takes the static tensors, reads and writes them in place, returns nothing. Any other tensor that it
# uses (weights) is a constant of the graph and must not be written.
Captured = Callable[[Sequence[torch.Tensor]], None]


class Launch(Protocol):
    """The work that a backend had been given up to some moment."""

    def done(self) -> bool:
        """True when all of it is done; does not wait."""


class Graph(Protocol):
    """A captured function: topology without memory."""

    @property
    def signature(self) -> str:
        """``sha256:<hex>`` of operations, shapes, dtypes and data flow; equal for equal topology."""

    def instantiate(self, static: Sequence[torch.Tensor]) -> GraphExec:
        """Bind to ``static``, of the captured shapes, strides and dtypes, without running anything.

        Raises:
            CaptureError: a tensor differs in shape, stride, dtype or device, or the device refuses.
        """


class GraphExec(Protocol):
    """An instantiated graph."""

    def replay(self) -> None:
        """Launch; inside the backend's :meth:`GraphBackend.stream`. May return before the work is done."""

    def update(self, graph: Graph) -> UpdateResult:
        """Run ``graph`` from the next replay on, at the addresses this exec is bound to; runs nothing now.

        Launches under way finish as what they were. ``graph`` may belong to another backend object of
        the same kind; its constants stay alive as long as this exec runs them.

        Returns:
            ``SUCCESS``, or why the graphs cannot stand in for one another: the exec then runs what it ran.
        """

    def close(self) -> None:
        """Drop memory held by this exec. It must be idle and is not replayed again."""


class GraphBackend(Protocol):
    """Captures and runs graphs of one generation."""

    @property
    def name(self) -> str:
        """``tape``, ``aoti`` or ``cuda``."""

    @property
    def tolerance(self) -> float:
        """How far a replay may be from the eager run, see :func:`reproduces`; 0 means equal to the bit."""

    @property
    def in_place(self) -> bool:
        """True when a replay writes what the function writes and nothing else.

        Otherwise it may write neighbouring elements of a static tensor back as it found them, and nobody else
        may write to the static tensors while it runs: two generations then cannot share one.
        """

    def capture(self, function: Captured, static: Sequence[torch.Tensor]) -> Graph:
        """Run ``function`` once on ``static`` and record it; ``static`` holds the eager result afterwards.

        Raises:
            CaptureError: the function failed, or does something that no graph can replay.
        """

    def stream(self) -> AbstractContextManager[None]:
        """Where inputs are copied and graphs replayed, in order."""

    def launched(self) -> Launch:
        """Everything launched so far; a generation may be freed when it is done and nothing was launched since."""

    def wait(self) -> None:
        """Block this thread until everything launched so far is done; never synchronizes the device."""

    def close(self) -> None:
        """Release what outlives the execs (stream, pool). All execs are closed."""


def reproduces(eager: torch.Tensor, replayed: torch.Tensor, tolerance: float) -> bool:
    """True when a replay gave what the eager run gave.

    Args:
        eager: the reference.
        replayed: same shape and dtype.
        tolerance: of the backend: 0 for equal bits, else the largest absolute difference allowed, as a
            share of the largest magnitude in ``eager``.
    """
    if tolerance == 0 or not eager.is_floating_point():
        return torch.equal(eager.reshape(-1).view(torch.uint8), replayed.reshape(-1).view(torch.uint8))
    scale = eager.abs().max() if eager.numel() else torch.zeros(())
    return torch.allclose(replayed, eager, rtol=0, atol=tolerance * float(scale))
