"""Modules that have exactly the points of the signature table, with their signatures, and no behaviour of their own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from engine.adapters.tensorrt_llm.signatures import Point


class Behaviour(Protocol):
    """What the points do."""

    def call(self, entry: Point, owner: Any, arguments: Mapping[str, Any]) -> Any:
        """Call a function, method (of ``owner``) or class (whose new instance is ``owner``)."""

    def read(self, entry: Point, owner: Any) -> Any:
        """Read a value of a module (``owner`` None) or an object."""


def strict_modules(points: Sequence[Point], behaviour: Behaviour) -> dict[str, ModuleType]:
    """Modules that have exactly ``points``."""
    modules: dict[str, ModuleType] = {}
    for entry in sorted(points, key=lambda entry: entry.name.count(".")):
        module_name, _, qualified = entry.name.partition(":")
        owner, _, member = qualified.rpartition(".")
        module = modules.setdefault(module_name, ModuleType(module_name))
        if owner:
            cls = _class(module, owner)
            setattr(cls, member, _member(entry, behaviour))
        elif entry.kind == "class":
            cls = _class(module, member)
            cls.__init__ = _function(entry, behaviour)
        else:
            setattr(module, member, _member(entry, behaviour))
        if entry.fields_of:
            model_module, _, model = entry.fields_of.partition(":")
            target = _class(modules.setdefault(model_module, ModuleType(model_module)), model)
            target.model_fields = {**getattr(target, "model_fields", {}), **dict.fromkeys(entry.fields)}
    return modules


def _class(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        setattr(module, name, type(name, (), {"__init__": _keep}))
    return getattr(module, name)


def _member(entry: Point, behaviour: Behaviour) -> Any:
    if entry.kind != "value":
        return _function(entry, behaviour)
    if "." not in entry.name.partition(":")[2]:
        return behaviour.read(entry, None)
    return property(lambda self: behaviour.read(entry, self))


def _function(entry: Point, behaviour: Behaviour) -> Callable[..., Any]:
    is_method = entry.kind == "class" or "." in entry.name.partition(":")[2]

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) != is_method:
            raise TypeError(f"{entry.name} takes keyword arguments here, so that their names are checked")
        return behaviour.call(entry, args[0] if args else None, kwargs)

    async def run_async(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return run(*args, **kwargs)

    function: Any = run_async if entry.kind == "coroutine" else run
    kinds = inspect.Parameter
    parameters = [kinds("self", kinds.POSITIONAL_OR_KEYWORD)] if is_method else []
    parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in entry.parameters]
    if entry.extra:
        parameters.append(kinds(entry.extra[0], kinds.KEYWORD_ONLY, default=None))
    if entry.fields:
        parameters.append(kinds("kwargs", kinds.VAR_KEYWORD))
    function.__signature__ = inspect.Signature(parameters)
    return function  # type: ignore[no-any-return]


def _keep(self: Any, state: Any = None) -> None:
    self.state = state
