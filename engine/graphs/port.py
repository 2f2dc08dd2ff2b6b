"""What a graph backend offers; the engine knows no other way to run a model.

The words are CUDA's: *capture* turns a function into a graph, *instantiate* binds a graph to memory
and gives a graph exec, *replay* launches it. One backend object serves one generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

# Takes the static tensors, reads and writes them in place, returns nothing. Any other tensor that it
# uses (weights) is a constant of the graph and must not be written.
Captured = Callable[[Sequence[torch.Tensor]], None]


class GraphExec(Protocol):
    """An instantiated graph."""

    def replay(self) -> None:
        """Launch; inside the backend's :meth:`GraphBackend.stream`. May return before the work is done."""

    def close(self) -> None:
        """Drop memory held by this exec. It must be idle and is not replayed again."""


class Graph(Protocol):
    """A captured function: topology without memory."""

    @property
    def signature(self) -> str:
        """``sha256:<hex>`` of operations, shapes, dtypes and data flow; equal for equal topology."""

    def instantiate(self, static: Sequence[torch.Tensor]) -> GraphExec:
        """Bind to ``static``, of the captured shapes, strides and dtypes, without running anything.

        Raises:
            CaptureError: a tensor differs in shape, stride, dtype or device.
        """


class GraphBackend(Protocol):
    """Captures and runs graphs of one generation."""

    @property
    def name(self) -> str:
        """``tape`` or ``cuda``."""

    def capture(self, function: Captured, static: Sequence[torch.Tensor]) -> Graph:
        """Run ``function`` once on ``static`` and record it; ``static`` holds the eager result afterwards.

        Raises:
            CaptureError: the function failed, or does something that no graph can replay.
        """

    def stream(self) -> AbstractContextManager[None]:
        """Where inputs are copied and graphs replayed, in order."""

    def wait(self) -> None:
        """Block this thread until everything launched so far is done; never synchronizes the device."""

    def close(self) -> None:
        """Release what outlives the execs (stream, pool). All execs are closed."""
