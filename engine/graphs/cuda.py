"""The CUDA backend: one capture stream and one memory pool per generation. Not run on a GPU.

Facts this follows (PyTorch sources and issues, CUDA Runtime API documentation):

- ``torch.cuda.graph`` synchronizes the device and empties the cache on entry, so captures call
  ``capture_begin``/``capture_end`` themselves, with ``capture_error_mode="thread_local"``: CUDA calls of
  the serving thread then do not break a capture of the staging thread.
- Graphs captured on one stream share a cuBLAS workspace (pytorch#193402, pytorch#175276), and graphs of
  one pool share memory for intermediates: neither may run at the same time. So a generation has a capture
  stream and a pool of its own, and replays on one other stream, in order.
- A pool whose last graph is gone cannot be captured into again (the caching allocator asserts that it is in
  use): a :class:`torch.cuda.MemPool` keeps it, and gives back its memory alone when dropped.
- A capture runs no kernel. Rebinding is therefore a second capture, and live KV is not touched by it.
- ``cudaGraphExecUpdate`` does not affect launches under way; graph objects are not safe to use from two
  threads at once.
- A failed capture loses its pool before torch 2.14, see :mod:`engine.graphs.taint`.
"""

from __future__ import annotations

import importlib
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from engine.errors import CaptureError
from engine.graphs.port import Captured, Graph
from engine.graphs.record import check_binding, record
from engine.graphs.result import UpdateResult
from engine.graphs.taint import PROCESS, lost_pool
from engine.graphs.topology import Topology, compare, signature

# Held while a capture is open and while a pool is dropped: dropping frees memory, and nothing may be
# freed while any capture is open. The serving thread never takes it.
_capturing = threading.Lock()


class Driver:
    """Every call into ``torch.cuda`` and ``cuda.bindings``; tests put a simulated device in its place."""

    def stream(self) -> Any:
        """A new stream."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """The current stream of this thread."""
        return torch.cuda.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes ``stream`` the current one of this thread."""
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        """A new event, without timing."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pool(self) -> Any:
        """A new memory pool."""
        return torch.cuda.MemPool()

    def graph(self, *, keep_graph: bool) -> Any:
        """A graph to capture into; ``keep_graph`` leaves it without an exec, to update another from."""
        return torch.cuda.CUDAGraph(keep_graph=keep_graph)

    def update(self, instantiated: Any, graph: Any) -> int:
        """``cudaGraphExecUpdate``; returns a ``cudaGraphExecUpdateResult``."""
        try:
            runtime = importlib.import_module("cuda.bindings.runtime")
        except ImportError:
            return UpdateResult.NOT_SUPPORTED
        _, info = runtime.cudaGraphExecUpdate(
            runtime.cudaGraphExec_t(init_value=instantiated.raw_cuda_graph_exec()),
            runtime.cudaGraph_t(init_value=graph.raw_cuda_graph()),
        )
        # A refusal is also the thread's last error, where torch would find it and blame the next call.
        runtime.cudaGetLastError()
        return int(info.result)


def result_of(code: int) -> UpdateResult:
    """The result that a ``cudaGraphExecUpdateResult`` stands for; a code of a later CUDA is an error."""
    try:
        return UpdateResult(code)
    except ValueError:
        return UpdateResult.ERROR


class CudaExec:
    """An instantiated CUDA graph."""

    def __init__(self, backend: CudaBackend, graph: CudaGraph, static: Sequence[torch.Tensor]) -> None:
        self._backend = backend
        self._graph: CudaGraph | None = graph
        self._static = tuple(static)
        self._instantiated = backend.bind(graph.function, static, keep_graph=False)
        # The capture whose memory the exec runs in: its own, or that of the last update.
        self._memory = self._instantiated
        self._lock = threading.Lock()

    def replay(self) -> None:
        """Launch on the current stream."""
        with self._lock:
            self._instantiated.replay()

    def update(self, graph: Graph) -> UpdateResult:
        """See :meth:`engine.graphs.port.GraphExec.update`.

        The new graph is captured on this exec's addresses, into this backend's pool: its intermediates
        then never meet those of a generation that runs at the same time.

        Raises:
            CaptureError: ``graph`` cannot be captured on these addresses; the exec is as it was.
        """
        if self._graph is None:
            return UpdateResult.ERROR
        if not isinstance(graph, CudaGraph):
            return UpdateResult.NOT_SUPPORTED
        result = compare(self._graph.topology, graph.topology)
        if result is not UpdateResult.SUCCESS:
            return result
        captured = self._backend.bind(graph.function, self._static, keep_graph=True)
        with self._lock:
            result = result_of(self._backend.driver.update(self._instantiated, captured))
        if result is not UpdateResult.SUCCESS:
            captured.reset()
            return result
        if self._memory is not self._instantiated:
            self._memory.reset()
        self._memory, self._graph = captured, graph
        return result

    def close(self) -> None:
        """Destroy the exec; its pool lives until the backend is closed."""
        self._instantiated.reset()
        self._memory.reset()
        self._graph, self._static = None, ()


class CudaGraph:
    """A captured function. Kept as a function: a CUDA graph has its addresses baked in."""

    def __init__(self, backend: CudaBackend, function: Captured, topology: Topology) -> None:
        self._backend = backend
        self.function = function
        self.topology = topology

    @property
    def signature(self) -> str:
        """See :class:`engine.graphs.port.Graph`."""
        return signature(self.topology)

    def instantiate(self, static: Sequence[torch.Tensor]) -> CudaExec:
        """See :meth:`engine.graphs.port.Graph.instantiate`."""
        check_binding(static, self.topology.static)
        return CudaExec(self._backend, self, static)


class CudaLaunch:
    """Work up to an event of the stream."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        """See :meth:`engine.graphs.port.Launch.done`."""
        return bool(self._event.query())


class CudaBackend:
    """See :class:`engine.graphs.port.GraphBackend`."""

    name = "cuda"
    tolerance = 0.0
    in_place = True

    def __init__(self, driver: Driver | None = None) -> None:
        self.driver = driver or Driver()
        self._stream = self.driver.stream()
        self._capture_stream = self.driver.stream()
        self._pool = self.driver.pool()

    def capture(self, function: Captured, static: Sequence[torch.Tensor]) -> CudaGraph:
        """See :meth:`engine.graphs.port.GraphBackend.capture`."""
        # This eager run gives the topology, leaves the reference result in `static`, and warms up cuBLAS:
        # its workspace for the capture stream is then allocated outside any capture.
        for before in (self.driver.current_stream(), self._stream):
            self._capture_stream.wait_stream(before)
        with self.driver.on(self._capture_stream):
            topology = record(function, static).topology
        self._capture_stream.synchronize()
        return CudaGraph(self, function, topology)

    def bind(self, function: Captured, static: Sequence[torch.Tensor], *, keep_graph: bool) -> Any:
        """Capture ``function`` on the addresses of ``static``; runs no kernel.

        Raises:
            CaptureError: the function or the device refused; the process may be tainted.
        """
        graph = self.driver.graph(keep_graph=keep_graph)
        uses_before = self._pool.use_count()
        ending = False
        with _capturing, self.driver.on(self._capture_stream), torch.inference_mode():
            try:
                graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
                function(static)
                ending = True
                graph.capture_end()
            except Exception as error:
                # Intermediates held by the error's frames would keep memory of the pool.
                traceback.clear_frames(error.__traceback__)
                if not ending:
                    with suppress(Exception):  # the capture is already invalid
                        graph.capture_end()
                graph.reset()
                lost = lost_pool(torch.__version__, uses_before=uses_before, uses_after=self._pool.use_count())
                if lost is not None:
                    PROCESS.mark(lost)
                raise CaptureError(f"capture failed: {error}" + (f" ({lost})" if lost else "")) from error
        return graph

    @contextmanager
    def stream(self) -> Iterator[None]:
        """This generation's stream."""
        with self.driver.on(self._stream):
            yield

    def launched(self) -> CudaLaunch:
        """See :meth:`engine.graphs.port.GraphBackend.launched`; one event, behind all launches of the stream."""
        event = self.driver.event()
        event.record(self._stream)
        return CudaLaunch(event)

    def wait(self) -> None:
        """Wait for launches and copies on this generation's stream."""
        self._stream.synchronize()

    def close(self) -> None:
        """Give the pool back; the last graph is closed."""
        with _capturing:
            del self._pool
