"""Records the aten operations of a function, with the data flow between them.

A :class:`torch.utils._python_dispatch.TorchDispatchMode` sees every operation below autograd. Operations
whose result a replay could not reproduce or could not follow (random numbers, values read back to Python,
shapes that depend on values, writes to memory that is not static) refuse the capture. Composite operations
are taken apart, so that nothing of the kind can hide in one; a few harmless ones stay whole.
"""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import CaptureError
from engine.graphs.binding import quickest
from engine.graphs.port import Captured
from engine.graphs.topology import Call, Kind, Ref, TensorSpec, Topology

_REFUSED_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
# Attention kernels carry the random tag for their dropout; without dropout they draw nothing.
_DROPOUT = "dropout_p"
# Composite operations that are functions of their arguments and nothing else. Kept whole, a step has half
# as many operations: rms_norm alone is six.
_WHOLE = frozenset(
    {"aten::chunk", "aten::linear", "aten::reshape", "aten::rms_norm", "aten::scaled_dot_product_attention"}
)


@dataclass(frozen=True, slots=True)
class Recording:
    """A topology, and what to run it with.

    Attributes:
        topology: see :mod:`engine.graphs.topology`.
        constants: weights and tables, by value number.
        calls: for each call of the topology, a function that does it.
    """

    topology: Topology
    constants: dict[int, torch.Tensor]
    calls: tuple[Callable[..., Any], ...]


def describe(tensor: torch.Tensor) -> TensorSpec:
    """The tensor without address and content; the device by its kind."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype, tuple(tensor.shape), tensor.stride(), tensor.device.type)


def check_binding(static: Sequence[torch.Tensor], captured: Sequence[TensorSpec]) -> None:
    """Refuse static tensors that differ from those of the capture.

    Raises:
        CaptureError: another number of tensors, or one differs in shape, stride, dtype or device.
    """
    found = tuple(map(describe, static))
    if len(found) != len(captured):
        raise CaptureError(f"{len(found)} static tensors, captured with {len(captured)}")
    for number, (tensor, expected) in enumerate(zip(found, captured, strict=True)):
        if tensor != expected:
            raise CaptureError(f"static tensor {number} is {tensor}, captured with {expected}")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations as usual and takes note of them."""

    def __init__(self, static: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._static = tuple(static)
        self._calls: list[Call] = []
        self._functions: list[Callable[..., Any]] = []
        self._constants: dict[int, torch.Tensor] = {}
        self._values = 0
        # Known by object identity; the reference tells a tensor from a dead one that had its identity.
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        for tensor in static:
            assert self._number_of(tensor) is None, "a tensor is static twice"
            self._number(tensor)
        self._static_storages = set(filter(None, map(_storage, static)))
        self._constant_storages: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Wrapping this mode for the compiler, which we do not use, would import it: 3 s and 150 MB.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record and run one operation."""
        kwargs = kwargs or {}
        facts = _facts(func)
        if facts.composite:
            with self:
                return func.decompose(*args, **kwargs)
        recorded_args = tuple(map_nested(self._read, arg) for arg in args)
        recorded_kwargs = {key: map_nested(self._read, value) for key, value in kwargs.items()}
        self._check(func, facts, args, kwargs)
        result = func(*args, **kwargs)
        listed = isinstance(result, list | tuple)
        results = tuple(result) if listed else (result,)
        kind = _kind(facts, (*args, *kwargs.values()), results)
        outputs = tuple(map(self._made, results))
        self._calls.append(Call(func, kind, recorded_args, recorded_kwargs, outputs, listed))
        self._functions.append(quickest(func, args, kwargs, result))
        return result

    def finish(self) -> Recording:
        """What was recorded."""
        topology = Topology(
            static=tuple(map(describe, self._static)),
            constants={value: describe(tensor) for value, tensor in self._constants.items()},
            calls=tuple(self._calls),
            values=self._values,
        )
        return Recording(topology, self._constants, tuple(self._functions))

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        known = self._numbers.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _number(self, tensor: torch.Tensor) -> int:
        number = self._values
        self._values += 1
        self._numbers[id(tensor)] = (weakref.ref(tensor), number)
        return number

    def _read(self, arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        number = self._number_of(arg)
        if number is None:
            storage = _storage(arg)
            if storage in self._static_storages:
                raise CaptureError("a tensor made before the capture aliases a static one and would not follow it")
            if storage is not None:
                self._constant_storages.add(storage)
            number = self._number(arg)
            self._constants[number] = arg
        return Ref(number)

    def _made(self, output: Any) -> int | None:
        if not isinstance(output, torch.Tensor) or self._number_of(output) is not None:
            return None
        return self._number(output)

    def _check(self, func: Any, facts: _OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if facts.refused is not None and (facts.dropout is None or _argument(facts.dropout, args, kwargs)):
            raise CaptureError(f"{func} cannot be replayed ({facts.refused})")
        if any(_storage(tensor) in self._constant_storages for tensor in written_tensors(func, args, kwargs)):
            raise CaptureError(f"{func} writes to a tensor that is not static")


@dataclass(frozen=True, slots=True)
class _OpFacts:
    """What matters about an operation; arguments by position and name."""

    composite: bool
    refused: str | None
    dropout: tuple[int, str] | None
    written: tuple[tuple[int, str], ...]


@functools.cache
def _facts(func: Any) -> _OpFacts:
    schema = func._schema  # noqa: SLF001 - the only place that tells names, aliasing and types
    named = [((position, argument.name), argument.alias_info) for position, argument in enumerate(schema.arguments)]
    refused = next((tag.name for tag in _REFUSED_TAGS if tag in func.tags), None)
    if refused is None and not all("Tensor" in str(returned.type) for returned in schema.returns):
        refused = "value read back"
    random = refused == torch.Tag.nondeterministic_seeded.name
    composite_key = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - has no public name
    return _OpFacts(
        composite=schema.name not in _WHOLE and func.has_kernel_for_dispatch_key(composite_key),
        refused=refused,
        dropout=next((key for key, _ in named if random and key[1] == _DROPOUT), None),
        written=tuple(key for key, alias in named if alias is not None and alias.is_write),
    )


def map_nested(function: Callable[[Any], Any], arg: Any) -> Any:
    """Apply ``function`` to the leaves of a (possibly nested) list or tuple argument."""
    if isinstance(arg, list | tuple):
        return [map_nested(function, item) for item in arg]
    return function(arg)


def _tensors(arg: Any) -> Iterator[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        yield arg
    elif isinstance(arg, list | tuple):
        for item in arg:
            yield from _tensors(item)


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that an operation writes to."""
    return [tensor for key in _facts(func).written for tensor in _tensors(_argument(key, args, kwargs))]


def _storage(tensor: torch.Tensor) -> int | None:
    """Where the tensor's memory begins; None for one without memory."""
    return tensor.untyped_storage().data_ptr() or None


def _kind(facts: _OpFacts, arguments: tuple[Any, ...], results: tuple[Any, ...]) -> Kind:
    """Decided by the memory itself: whether ``reshape`` is a view depends on strides, not on its schema."""
    if facts.written:
        return Kind.WRITE
    read = {_storage(tensor) for tensor in _tensors(arguments)} - {None}
    made = [_storage(tensor) for tensor in _tensors(results)]
    return Kind.VIEW if made and read.issuperset(made) else Kind.COMPUTE


def _argument(key: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position, name = key
    return args[position] if position < len(args) else kwargs.get(name)


def record(function: Captured, static: Sequence[torch.Tensor]) -> Recording:
    """Run ``function`` once and return its recording.

    Raises:
        CaptureError: the function raised, or ran an operation that cannot be replayed.
    """
    recorder = Recorder(static)
    try:
        # In inference mode composite operations reach the recorder whole; autograd would take them apart.
        with torch.inference_mode(), recorder:
            function(static)
    except Exception as error:
        # Whoever keeps the error must not keep the tensors of the function that failed.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"capture failed: {error}") from error
    return recorder.finish()
