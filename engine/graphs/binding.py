"""Finds the quickest way to call an operation: torch's generated Python functions parse arguments faster.

Which overload such a function picks depends on its arguments. So a candidate is tried with those of the
recording, and taken only if it asks for the recorded operation, with the same arguments, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Methods first: they exist for views and in-place operations as well.
_NAMESPACES: tuple[Any, ...] = (torch.Tensor, torch, torch.nn.functional, torch._C._nn)  # noqa: SLF001 - where silu is
# Wrappers written in Python are no gain.
_COMPILED = ("builtin_function_or_method", "method_descriptor")
# By operation and kinds of arguments: what a generated function looks at.
_known: dict[Any, Callable[..., Any]] = {}


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is asked for and runs nothing; every operation gives ``result``."""

    def __init__(self, result: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._result = result
        self.asked: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in engine.graphs.record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.asked.append((func, args, kwargs or {}))
        return self._result


def quickest(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Callable[..., Any]:
    """A callable that does what ``op`` does for arguments of these kinds; ``op`` itself when nothing is quicker.

    Args:
        op: an operator overload.
        args: arguments of one call, as an operation recorder in inference mode got them.
        kwargs: likewise.
        result: what the call gave; handed out while candidates are tried.
    """
    key = (op, _kind(args), tuple((name, _kind(value)) for name, value in kwargs.items()))
    if key not in _known:
        _known[key] = next((call for call in _candidates(op) if _asks_for(call, op, args, kwargs, result)), op)
    return _known[key]


def _candidates(op: Any) -> list[Callable[..., Any]]:
    name = op._schema.name.removeprefix("aten::")  # noqa: SLF001 - the only place that has it
    found: list[Any] = [getattr(namespace, name, None) for namespace in _NAMESPACES]
    return [call for call in found if type(call).__name__ in _COMPILED]


def _asks_for(call: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    try:
        with _Probe(result) as probe:
            call(*args, **kwargs)
    except (TypeError, RuntimeError):
        return False  # takes other arguments
    return len(probe.asked) == 1 and probe.asked[0][0] is op and _same(probe.asked[0][1:], (args, kwargs))


def _kind(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        # One without dimensions can pass for a number, of its dtype.
        return torch.Tensor, None if arg.dim() else arg.dtype
    return tuple(map(_kind, arg)) if isinstance(arg, list | tuple) else type(arg)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left is right or (not isinstance(left, torch.Tensor) and type(left) is type(right) and left == right)
