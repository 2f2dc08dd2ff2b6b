"""Graph execs together with the memory whose addresses they have baked in.

In commit mode ``exchange`` every generation captures a set of its own. In commit mode ``copy`` a staged
generation *joins* the set of the serving one: only one of the two can run, the one whose weights are
*installed*, and installing copies the weights that differ into place. That takes no memory for a second
set of weights on the device and no capture, but the copy happens at the step boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.bucket import Bucket
from engine.graphs.port import GraphBackend, GraphExec
from engine.model import StepBuffers

Weights = Mapping[str, torch.Tensor]


class GraphSet:
    """Execs by bucket, their buffers and weights.

    Attributes:
        installed: number of the generation whose weights are in place.
        buffers: what the graphs read besides weights; equal for all who take turns.
    """

    def __init__(
        self,
        number: int,
        execs: Mapping[Bucket, GraphExec],
        io: StepBuffers,
        backend: GraphBackend,
        weights: Weights,
        buffers: Weights,
    ) -> None:
        self.execs = execs
        self.io = io
        self.backend = backend
        self.installed = number
        self.buffers = buffers
        self._weights = weights
        self._users = {number}
        self._sources: dict[int, Weights] = {}
        self._differ: tuple[str, ...] = ()

    def join(self, number: int, source: Weights, installed: Weights, checkpoint: Callable[[], None]) -> None:
        """Let ``number`` take turns with the generation in place.

        Args:
            number: of the joining generation.
            source: its weights, of equal names, shapes and dtypes, anywhere.
            installed: a second copy of the weights in place, to return to.
            checkpoint: called between tensors.
        """
        assert len(self._users) == 1
        differ = []
        for name, tensor in source.items():
            if not torch.equal(tensor, installed[name]):
                differ.append(name)
            checkpoint()
        self._differ = tuple(differ)
        self._sources = {number: source, self.installed: installed}
        self._users.add(number)

    def weights_of(self, number: int) -> Weights:
        """The weights of ``number``, in place or waiting."""
        return self._weights if number == self.installed else self._sources[number]

    def install(self, number: int) -> None:
        """Copy the weights of ``number`` into place; nothing happens when they are.

        Everything launched on the set is done. If copying fails half way the set serves nobody until an
        install succeeds.
        """
        if number == self.installed:
            return
        source = self._sources[number]
        self.installed = -1
        with self.backend.stream(), torch.no_grad():
            for name in self._differ:
                self._weights[name].copy_(source[name])
            self.backend.wait()
        self.installed = number

    def leave(self, number: int) -> None:
        """``number`` is freed; the set is closed with its last user."""
        self._users.discard(number)
        self._sources = {}
        if not self._users:
            self.close_execs()
            self.backend.close()

    def close_execs(self) -> None:
        """Drop every graph once nothing runs on it."""
        self.backend.wait()
        for graph_exec in self.execs.values():
            graph_exec.close()
