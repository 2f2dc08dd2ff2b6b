"""The topology of a recorded function: what two graphs must share to stand in for one another. Pure.

Values are numbered: static tensors first, then constants and results in order of appearance. Contents and
addresses of tensors are no part of a topology.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.graphs.result import UpdateResult


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor, by value number."""

    value: int


class Kind(enum.Enum):
    """What an operation does: look at memory differently, write to an argument, or make a new tensor."""

    VIEW = "view"
    WRITE = "write"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Call:
    """One operation. Tensors in ``args`` and ``kwargs`` are :class:`Ref`; None in ``outputs`` is not a new tensor.

    ``listed`` tells a list of results, even of one, from a single result.
    """

    op: Any
    kind: Kind
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    listed: bool

    @property
    def reads(self) -> list[int]:
        """Values among the arguments, in order, those inside lists as well."""
        return references((*self.args, *self.kwargs.values()))

    @property
    def makes(self) -> list[int]:
        """Values that did not exist before."""
        return [output for output in self.outputs if output is not None]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What must be equal for one tensor to stand in for another."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}, stride {list(self.stride)}, on {self.device}"


@dataclass(frozen=True, slots=True)
class Topology:
    """Calls in order, between static tensors, constants (by value number) and results; ``values`` of them in all."""

    static: tuple[TensorSpec, ...]
    constants: Mapping[int, TensorSpec]
    calls: tuple[Call, ...]
    values: int


def references(arg: Any) -> list[int]:
    """Values in an argument or a (nested) list of arguments, in order."""
    if isinstance(arg, Ref):
        return [arg.value]
    return [value for item in arg for value in references(item)] if isinstance(arg, list | tuple) else []


def _edges(topology: Topology) -> object:
    flow = [(call.reads, call.outputs) for call in topology.calls]
    return len(topology.static), sorted(topology.constants), flow


# What makes two topologies different, coarse before fine, and the code that tells it. Everything is
# compared as text: to Python, 1 equals True and 1.0, to an operation it does not.
_ASPECTS: tuple[tuple[UpdateResult, Callable[[Topology], object]], ...] = (
    (UpdateResult.TOPOLOGY_CHANGED, _edges),
    (UpdateResult.NODE_TYPE_CHANGED, lambda topology: [call.kind.value for call in topology.calls]),
    (UpdateResult.FUNCTION_CHANGED, lambda topology: [str(call.op) for call in topology.calls]),
    (UpdateResult.ATTRIBUTES_CHANGED, lambda topology: (topology.static, sorted(topology.constants.items()))),
    (
        UpdateResult.PARAMETERS_CHANGED,
        lambda topology: [(call.args, sorted(call.kwargs.items())) for call in topology.calls],
    ),
)


def signature(topology: Topology) -> str:
    """``sha256:<hex>``, the same in every process."""
    digest = hashlib.sha256()
    for result, aspect in _ASPECTS:
        digest.update(f"{result.value} {aspect(topology)!r}\n".encode())
    return "sha256:" + digest.hexdigest()


def compare(bound: Topology, other: Topology) -> UpdateResult:
    """``SUCCESS`` when both have one signature, else the code of the first aspect that differs.

    ``TOPOLOGY_CHANGED``: number of operations, or who feeds whom. ``NODE_TYPE_CHANGED``: a view became a
    computation, and the like. ``FUNCTION_CHANGED``: another operation. ``ATTRIBUTES_CHANGED``: shape,
    stride, dtype or device of a static or constant tensor. ``PARAMETERS_CHANGED``: another number passed.
    """
    for result, aspect in _ASPECTS:
        if repr(aspect(bound)) != repr(aspect(other)):
            return result
    return UpdateResult.SUCCESS
