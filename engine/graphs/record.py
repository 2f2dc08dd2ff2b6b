"""Records the aten operations of a function, with the data flow between them.

A :class:`torch.utils._python_dispatch.TorchDispatchMode` sees every operation below autograd and after
composite operations were taken apart. Operations whose result a replay could not reproduce or could not
follow (random numbers, values read back to Python, shapes that depend on values, writes to memory that
is not static) refuse the capture.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import CaptureError
from engine.graphs.port import Captured

_REFUSED_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
# Attention kernels carry the random tag for their dropout; without dropout they draw nothing.
_DROPOUT = "dropout_p"


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the recording, by number: static tensors first, then in order of appearance."""

    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """One operation. Tensors in ``args`` and ``kwargs`` are :class:`Ref`; None in ``outputs`` is not a new tensor."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]


@dataclass(slots=True)
class Recording:
    """Calls in order, and the constants (weights, tables) they use, by value number."""

    static: tuple[str, ...]
    calls: list[Call] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    values: int = 0

    def signature(self) -> str:
        """``sha256:<hex>`` of the topology; addresses and constants' contents do not count."""
        digest = hashlib.sha256(repr(self.static).encode())
        for value, tensor in self.constants.items():
            digest.update(f"{value}:{describe(tensor)}\n".encode())
        for call in self.calls:
            digest.update(f"{call.op} {call.args} {sorted(call.kwargs.items())} {call.outputs}\n".encode())
        return "sha256:" + digest.hexdigest()


def describe(tensor: torch.Tensor) -> str:
    """What must be equal for one tensor to stand in for another."""
    return f"{tensor.dtype}{list(tensor.shape)}{list(tensor.stride())}@{tensor.device.type}"


def map_nested(function: Callable[[Any], Any], arg: Any) -> Any:
    """Apply ``function`` to the leaves of a (possibly nested) list or tuple argument."""
    if isinstance(arg, list | tuple):
        return [map_nested(function, item) for item in arg]
    return function(arg)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations as usual and appends them to :attr:`recording`."""

    def __init__(self, static: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording(static=tuple(map(describe, static)), values=len(static))
        # Values are known by object identity, so each must stay alive until the capture ends.
        self._alive: list[torch.Tensor] = list(static)
        self._numbers = {id(tensor): number for number, tensor in enumerate(static)}
        assert len(self._numbers) == len(static)
        self._static_storages = {tensor.untyped_storage().data_ptr() for tensor in static}
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
        recorded_args = tuple(map_nested(self._read, arg) for arg in args)
        recorded_kwargs = {key: map_nested(self._read, value) for key, value in kwargs.items()}
        self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        outputs = tuple(map(self._made, result if isinstance(result, list | tuple) else (result,)))
        self.recording.calls.append(Call(func, recorded_args, recorded_kwargs, outputs))
        return result

    def _number(self, tensor: torch.Tensor) -> int:
        number = self.recording.values
        self.recording.values += 1
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)
        return number

    def _read(self, arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        if id(arg) not in self._numbers:
            storage = arg.untyped_storage().data_ptr()
            if storage in self._static_storages:
                raise CaptureError("a tensor made before the capture aliases a static one and would not follow it")
            self._constant_storages.add(storage)
            self.recording.constants[self._number(arg)] = arg
        return Ref(self._numbers[id(arg)])

    def _made(self, output: Any) -> int | None:
        if not isinstance(output, torch.Tensor) or id(output) in self._numbers:
            return None
        return self._number(output)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        facts = _facts(func)
        if facts.refused is not None and (facts.dropout is None or _argument(facts.dropout, args, kwargs)):
            raise CaptureError(f"{func} cannot be replayed ({facts.refused})")
        for written in facts.written:
            value = _argument(written, args, kwargs)
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._constant_storages:
                raise CaptureError(f"{func} writes to a tensor that is not static")


@dataclass(frozen=True, slots=True)
class _OpFacts:
    """What matters about an operation: a tag that refuses it, and arguments by position and name."""

    refused: str | None
    dropout: tuple[int, str] | None
    written: tuple[tuple[int, str], ...]


@functools.cache
def _facts(func: Any) -> _OpFacts:
    arguments = func._schema.arguments  # noqa: SLF001 - the only place that tells names and aliasing
    named = [((position, argument.name), argument.alias_info) for position, argument in enumerate(arguments)]
    refused = next((tag for tag in _REFUSED_TAGS if tag in func.tags), None)
    random = refused is torch.Tag.nondeterministic_seeded
    return _OpFacts(
        refused=None if refused is None else refused.name,
        dropout=next((key for key, _ in named if random and key[1] == _DROPOUT), None),
        written=tuple(key for key, alias in named if alias is not None and alias.is_write),
    )


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
        with torch.no_grad(), recorder:
            function(static)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"capture failed: {error}") from error
    return recorder.recording
