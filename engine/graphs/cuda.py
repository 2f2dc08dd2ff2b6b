"""The CUDA backend: one capture stream and one memory pool per generation. Not run on a GPU yet.

Facts this follows (PyTorch sources and issues):

- ``torch.cuda.graph`` synchronizes the device and empties the cache on entry, so captures call
  ``capture_begin``/``capture_end`` themselves, with ``capture_error_mode="thread_local"``: CUDA calls of
  the serving thread then do not break a capture of the staging thread.
- Graphs captured on one stream share a cuBLAS workspace (pytorch#193402, pytorch#175276): one stream
  per generation, and its pool is dropped only after its last graph.
- A capture runs no kernel. Rebinding is therefore a second capture, and live KV is not touched by it.
- A failed capture leaks its pool before torch 2.14 (pytorch#190348): the error then says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from engine.errors import CaptureError
from engine.graphs.port import Captured
from engine.graphs.record import describe, record

_POOL_FREED_SINCE = (2, 14)
_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
_LEAK = "" if _version >= _POOL_FREED_SINCE else " (its memory pool is lost until this process ends)"


class CudaExec:
    """An instantiated CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, launched: torch.cuda.Event) -> None:
        self._graph = graph
        self._launched = launched

    def replay(self) -> None:
        """Launch on the current stream and record the backend's event behind it."""
        self._graph.replay()
        self._launched.record()

    def close(self) -> None:
        """Destroy the graph; its pool lives until the last graph of the generation is gone."""
        self._graph.reset()


class CudaGraph:
    """A captured function. Kept as a function: a CUDA graph has its addresses baked in."""

    def __init__(self, backend: CudaBackend, function: Captured, static: tuple[str, ...], signature: str) -> None:
        self._backend = backend
        self._function = function
        self._static = static
        self.signature = signature

    def instantiate(self, static: Sequence[torch.Tensor]) -> CudaExec:
        """See :meth:`engine.graphs.port.Graph.instantiate`."""
        if (found := tuple(map(describe, static))) != self._static:
            raise CaptureError(f"static tensors are {found}, captured with {self._static}")
        return self._backend.bind(self._function, static)


class CudaBackend:
    """See :class:`engine.graphs.port.GraphBackend`."""

    name = "cuda"

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._launched = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def capture(self, function: Captured, static: Sequence[torch.Tensor]) -> CudaGraph:
        """See :meth:`engine.graphs.port.GraphBackend.capture`."""
        # The eager run gives the signature, warms up cuBLAS, and leaves the reference result in ``static``.
        with self.stream():
            recording = record(function, static)
        self._stream.synchronize()
        return CudaGraph(self, function, recording.static, recording.signature())

    def bind(self, function: Captured, static: Sequence[torch.Tensor]) -> CudaExec:
        """Capture ``function`` on the addresses of ``static``; runs no kernel."""
        graph = torch.cuda.CUDAGraph()
        with self.stream(), torch.no_grad():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function(static)
            except Exception as error:
                with suppress(RuntimeError):  # the capture is already invalid
                    graph.capture_end()
                raise CaptureError(f"capture failed: {error}{_LEAK}") from error
            graph.capture_end()
        return CudaExec(graph, self._launched)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """This generation's stream."""
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Wait for the event behind the last launch and for copies on this stream."""
        self._launched.synchronize()
        self._stream.synchronize()

    def close(self) -> None:
        """Give the pool back; the last graph is closed."""
        del self._pool
