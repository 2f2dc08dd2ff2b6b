"""A topology as a message to the compiling process: JSON, so that nothing but data crosses over."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from engine.graphs.topology import Call, Ref, TensorSpec, Topology

# Arguments that JSON does not know, by type: each is written as a name and looked up again in `torch`.
_NAMED: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "device": torch.device,
}


class CallSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A :class:`engine.graphs.topology.Call`: the operator's qualified name and overload, arguments encoded."""

    name: str
    overload: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[int | None]
    listed: bool


class GraphSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A :class:`engine.graphs.topology.Topology`; ``inputs`` are its static tensors, then its constants."""

    inputs: list[TensorSpec]
    input_values: list[int]
    calls: list[CallSpec]


def _encode(arg: Any) -> Any:
    if isinstance(arg, Ref):
        return {"value": arg.value}
    if isinstance(arg, list | tuple):
        return [_encode(item) for item in arg]
    for kind, found in _NAMED.items():
        if isinstance(arg, found):
            return {kind: str(arg).removeprefix("torch.")}
    if arg is None or isinstance(arg, bool | int | float | str):
        # JSON has no infinity, and attention masks are full of them.
        return {"float": repr(arg)} if isinstance(arg, float) else arg
    raise TypeError(f"an argument of type {type(arg).__name__} cannot be compiled")


def decode(arg: Any, values: dict[int, Any]) -> Any:
    """The argument that was encoded, with ``values`` in place of references."""
    if isinstance(arg, list):
        return [decode(item, values) for item in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, name),) = arg.items()
    if kind == "value":
        return values[name]
    if kind == "float":
        return float(name)
    return torch.device(name) if kind == "device" else getattr(torch, name)


def to_spec(topology: Topology) -> GraphSpec:
    """The topology as data.

    Raises:
        TypeError: an argument that has no encoding.
    """
    return GraphSpec(
        inputs=[*topology.static, *topology.constants.values()],
        input_values=[*range(len(topology.static)), *topology.constants],
        calls=[_call_spec(call) for call in topology.calls],
    )


def _call_spec(call: Call) -> CallSpec:
    name, _, overload = str(call.op).rpartition(".")
    return CallSpec(
        name=name,
        overload=overload,
        args=[_encode(arg) for arg in call.args],
        kwargs={key: _encode(arg) for key, arg in call.kwargs.items()},
        outputs=list(call.outputs),
        listed=call.listed,
    )


def operator(call: CallSpec) -> Any:
    """The operator overload that a call names, for example ``aten.linear`` and ``default``."""
    namespace, _, name = call.name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), call.overload)
