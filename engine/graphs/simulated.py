"""A CUDA device simulated on the CPU, to test what :mod:`engine.graphs.cuda` calls, and in which order.

A capture keeps the operations and writes nothing: as on a device, it leaves memory as it was. Calls that a
device would refuse, or answer with memory corruption, raise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from engine.graphs.cuda import Driver
from engine.graphs.record import map_nested, written_tensors
from engine.graphs.result import UpdateResult

_current = threading.local()
Operation = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class SimulatedStream:
    """Runs what it is given at once.

    Attributes:
        launches: graphs launched so far.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.launches = 0

    def synchronize(self) -> None:
        """Refused while capturing, as on a device."""
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def wait_stream(self, other: SimulatedStream) -> None:
        """Nothing to wait for."""
        other.synchronize()


class SimulatedEvent:
    """Done, unless the device is held busy and there were launches before it."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self._driver = driver
        self._launches = 0

    def record(self, stream: SimulatedStream) -> None:
        """Behind everything in ``stream``."""
        stream.synchronize()
        self._launches = stream.launches

    def query(self) -> bool:
        """See ``torch.cuda.Event.query``."""
        return not (self._driver.busy and self._launches)


class SimulatedPool:
    """Counts its users, as ``torch.cuda.MemPool`` does."""

    def __init__(self) -> None:
        self.users = 1

    @property
    def id(self) -> SimulatedPool:
        """Itself."""
        return self

    def use_count(self) -> int:
        """The pool object and its graphs."""
        return self.users


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps operations. Those that write are not run; the results of the others count for their shape only."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in engine.graphs.record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = written_tensors(func, args, kwargs)
        assert len(written) <= 1, f"{func} writes to several tensors"
        result = written[0] if written else func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        return result


class SimulatedGraph:
    """``torch.cuda.CUDAGraph``, as far as the backend uses it."""

    def __init__(self, driver: SimulatedDriver, *, keep_graph: bool) -> None:
        self._driver = driver
        self._keep_graph = keep_graph
        self._pool: SimulatedPool | None = None
        self._capture: _Capture | None = None
        self._failed = False
        self.operations: list[Operation] | None = None
        self.instantiated: list[Operation] | None = None

    def capture_begin(self, pool: SimulatedPool, capture_error_mode: str) -> None:
        """From here on, operations of this thread go into the graph."""
        assert capture_error_mode == "thread_local"
        assert pool.users > 0, "a pool without users cannot be captured into"
        stream: SimulatedStream = _current.stream
        stream.synchronize()
        self._pool, pool.users = pool, pool.users + 1
        stream.capturing = True
        self._driver.captures_open += 1
        self._capture = _Capture()
        self._capture.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """Ends the capture; raises what the driver is told to raise."""
        assert self._capture is not None, "no capture is open"
        capture, self._capture = self._capture, None
        capture.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _current.stream.capturing = False
        self._driver.captures_open -= 1
        if self._driver.capture_error is not None:
            self._failed = True
            raise RuntimeError(self._driver.capture_error)
        self.operations = capture.operations if self._keep_graph else None
        self.instantiated = None if self._keep_graph else capture.operations

    def replay(self) -> None:
        """Run every operation on the memory of the capture."""
        assert self.instantiated is not None, "no exec"
        assert not _current.stream.capturing, "a launch into a capturing stream becomes part of the capture"
        _current.stream.launches += 1
        made: dict[int, Any] = {}

        def current(arg: Any) -> Any:
            return made.get(id(arg), arg)

        for func, args, kwargs, recorded in self.instantiated:
            result = func(*map_nested(current, args), **{key: map_nested(current, arg) for key, arg in kwargs.items()})
            if isinstance(recorded, list | tuple):
                made.update(zip(map(id, recorded), result, strict=True))
            else:
                made[id(recorded)] = result

    def reset(self) -> None:
        """Drop the graph; a failed capture keeps its pool when the driver is of that kind."""
        assert self._capture is None, "reset of an open capture"
        self.operations = self.instantiated = None
        if self._pool is not None and not (self._driver.loses_pools and self._failed):
            self._pool.users -= 1
        self._pool = None


class SimulatedDriver(Driver):
    """Stands in for :class:`engine.graphs.cuda.Driver`.

    Attributes:
        busy: events are not done.
        captures_open: captures begun and not ended.
        capture_error: what the end of a capture raises, if anything.
        loses_pools: a failed capture keeps its pool, as before torch 2.14.
        update_result: what ``cudaGraphExecUpdate`` answers; anything but 0 changes nothing.
    """

    def __init__(self) -> None:
        self.busy = False
        self.captures_open = 0
        self.capture_error: str | None = None
        self.loses_pools = False
        self.update_result: int = UpdateResult.SUCCESS

    def stream(self) -> SimulatedStream:
        """See :class:`engine.graphs.cuda.Driver`, here and below."""
        return SimulatedStream()

    def current_stream(self) -> SimulatedStream:
        """A stream of nobody's when none was made current."""
        return getattr(_current, "stream", None) or SimulatedStream()

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """The current stream of this thread."""
        before = getattr(_current, "stream", None)
        _current.stream = stream
        try:
            yield
        finally:
            _current.stream = before

    def event(self) -> SimulatedEvent:
        """A new event."""
        return SimulatedEvent(self)

    def pool(self) -> SimulatedPool:
        """A new pool."""
        return SimulatedPool()

    def graph(self, *, keep_graph: bool) -> SimulatedGraph:
        """A new graph."""
        return SimulatedGraph(self, keep_graph=keep_graph)

    def update(self, instantiated: SimulatedGraph, graph: SimulatedGraph) -> int:
        """Makes the exec run the other graph."""
        assert instantiated.instantiated is not None
        assert graph.operations is not None, "the source has to be captured with keep_graph"
        assert graph.instantiated is None, "the source needs no exec of its own"
        if self.update_result == UpdateResult.SUCCESS:
            instantiated.instantiated = graph.operations
        return self.update_result
