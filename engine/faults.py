"""Named faults of a graph backend, for tests: each state of staging, and the step after the exchange.

A fault is a decorator around a real backend, handed to the controller as its ``make_backend``. Production
never imports this module and has no branch for it. Faults of files (loading, checksums) need no decorator:
tests damage the files.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from engine.errors import CaptureError
from engine.graphs.port import Captured, Graph, GraphBackend, GraphExec, Launch
from engine.graphs.result import UpdateResult

# Which of the static tensors holds the logits: rows, tables, last, logits, KV (see engine.stage).
_LOGITS = 3

MakeBackend = Callable[[torch.device], GraphBackend]


class Fault(enum.StrEnum):
    """Where it strikes; the message of what it raises names it."""

    CAPTURE = "capture"
    INSTANTIATE = "instantiate"
    WARM_UP = "warm-up"
    WRONG_WARM_UP = "wrong-warm-up"
    GOLDEN = "golden"
    NOT_FINITE = "not-finite"
    EXCHANGE = "exchange"


class InjectedFaultError(CaptureError):
    """A fault that a test asked for."""


def faulty(make_backend: MakeBackend, fault: Fault, *, healthy_graphs: int = 1) -> MakeBackend:
    """Makes backends that fail at ``fault``, and otherwise work like those of ``make_backend``.

    Args:
        make_backend: makes the real one.
        fault: where it strikes.
        healthy_graphs: graphs captured without a fault before, so that there is something to clean up.
    """
    return lambda device: FaultyBackend(make_backend(device), fault, healthy_graphs)


class FaultyBackend:
    """A :class:`engine.graphs.port.GraphBackend`.

    Attributes:
        armed: while False, faults of serving (EXCHANGE) wait; a test arms them after staging.
    """

    def __init__(self, real: GraphBackend, fault: Fault, healthy_graphs: int) -> None:
        self.fault = fault
        self.armed = False
        self._real = real
        self._healthy_graphs = healthy_graphs
        self._captured = 0

    @property
    def name(self) -> str:
        """The real one's."""
        return self._real.name

    @property
    def tolerance(self) -> float:
        """The real one's."""
        return self._real.tolerance

    @property
    def in_place(self) -> bool:
        """The real one's."""
        return self._real.in_place

    @property
    def due(self) -> bool:
        """True once enough graphs were captured."""
        return self._captured > self._healthy_graphs

    def capture(self, function: Captured, static: Sequence[torch.Tensor]) -> Graph:
        """See the port."""
        self._captured += 1
        if self.fault is Fault.CAPTURE and self.due:
            raise InjectedFaultError("injected: capture")
        return _FaultyGraph(self._real.capture(function, static), self)

    def stream(self) -> AbstractContextManager[None]:
        """See the port."""
        return self._real.stream()

    def launched(self) -> Launch:
        """See the port."""
        return self._real.launched()

    def wait(self) -> None:
        """See the port."""
        self._real.wait()

    def close(self) -> None:
        """See the port."""
        self._real.close()


class _FaultyGraph:
    """A :class:`engine.graphs.port.Graph`."""

    def __init__(self, real: Graph, backend: FaultyBackend) -> None:
        self.real = real
        self._backend = backend

    @property
    def signature(self) -> str:
        return self.real.signature

    def instantiate(self, static: Sequence[torch.Tensor]) -> GraphExec:
        if self._backend.fault is Fault.INSTANTIATE and self._backend.due:
            raise InjectedFaultError("injected: instantiate")
        return _FaultyExec(self.real.instantiate(static), static[_LOGITS], self._backend)


class _FaultyExec:
    """A :class:`engine.graphs.port.GraphExec`. Its first replay is the warm-up, by the protocol of staging."""

    def __init__(self, real: GraphExec, logits: torch.Tensor, backend: FaultyBackend) -> None:
        self._real = real
        self._logits = logits
        self._backend = backend
        self._warm = False

    def replay(self) -> None:
        fault, warming = self._backend.fault, not self._warm
        self._warm = True
        if fault is Fault.WARM_UP and warming and self._backend.due:
            raise InjectedFaultError("injected: warm-up")
        if fault is Fault.EXCHANGE and self._backend.armed:
            raise InjectedFaultError("injected: exchange")
        self._real.replay()
        if fault is Fault.WRONG_WARM_UP and warming and self._backend.due:
            self._logits.add_(1)
        elif fault is Fault.GOLDEN and not warming:
            # Still finite, but another token wins.
            self._logits.neg_()
        elif fault is Fault.NOT_FINITE and not warming and self._backend.armed:
            self._logits.fill_(math.nan)

    def update(self, graph: Graph) -> UpdateResult:
        assert isinstance(graph, _FaultyGraph)
        return self._real.update(graph.real)

    def close(self) -> None:
        self._real.close()
