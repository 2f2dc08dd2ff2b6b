"""What the installed TensorRT-LLM offers: found by looking at names and parameters, never at a version number."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args

from engine.adapters.tensorrt_llm.signatures import POINTS, Feature, Point

Importer = Callable[[str], ModuleType]
_FEATURES: tuple[Feature, ...] = get_args(Feature)
# A feature that is useless without another.
_NEEDS: dict[Feature, Feature] = {
    "engine_set": "core",
    "checkpoint": "core",
    "async": "checkpoint",
    "in_place": "async",
    "pause": "async",
    "reuse_reset": "async",
    "park": "reuse_reset",
    "sleep_config": "park",
}


@dataclass(frozen=True, slots=True)
class Features:
    """Features by name; a missing one says what it lacks."""

    lacking: dict[Feature, str]

    def __contains__(self, feature: Feature) -> bool:
        return feature not in self.lacking

    def why_not(self, feature: Feature) -> str:
        """What the installed version lacks for ``feature``, or ""."""
        return self.lacking.get(feature, "")


def detect(importer: Importer = importlib.import_module) -> Features:
    """Look for every point of the table."""
    lacking: dict[Feature, str] = {}
    for entry in POINTS:
        if entry.feature not in lacking and (problem := mismatch(entry, importer)):
            lacking[entry.feature] = problem
        if entry.extra and (problem := _extra_mismatch(entry, importer)):
            lacking.setdefault(entry.extra[1], problem)
    for feature in _FEATURES:
        needed = _NEEDS.get(feature)
        if needed in lacking:
            lacking.setdefault(feature, lacking[needed])
    return Features(lacking)


def resolve(name: str, importer: Importer) -> Any:
    """The object called ``module:qualified.name``.

    Raises:
        ImportError: the module does not import.
        AttributeError: the module has no such name.
    """
    module, _, qualified = name.partition(":")
    found: Any = importer(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def mismatch(entry: Point, importer: Importer) -> str:
    """How the installed version differs from ``entry``, or ""."""
    try:
        found = _field(entry.name, importer) if entry.kind == "value" else resolve(entry.name, importer)
    except Exception as error:
        # Importing vendor modules runs vendor code, which may fail in any way; either way the point is not there.
        return f"{entry.name} is not there ({type(error).__name__}: {error})"
    if entry.kind == "value":
        return ""
    if not callable(found):
        return f"{entry.name} is not callable"
    return _call_mismatch(entry, found, importer)


def _extra_mismatch(entry: Point, importer: Importer) -> str:
    """Why the extra parameter cannot be passed; a function that is not there at all is no matter of its parameters."""
    assert entry.extra is not None
    if mismatch(entry, importer):
        return ""
    name = entry.extra[0]
    parameters = _parameters(entry, resolve(entry.name, importer), importer)
    return "" if name in parameters else f"{entry.name} has no parameter {name}"


def _field(name: str, importer: Importer) -> Any:
    """As :func:`resolve`, but fields of pydantic models and dataclasses count, which are no class attributes."""
    owner, _, last = name.rpartition(".") if "." in name.partition(":")[2] else ("", "", "")
    if owner:
        cls = resolve(owner, importer)
        for table in ("model_fields", "__dataclass_fields__"):
            if last in getattr(cls, table, {}):
                return cls
    return resolve(name, importer)


def _call_mismatch(entry: Point, found: Any, importer: Importer) -> str:
    if entry.kind == "coroutine" and not inspect.iscoroutinefunction(found):
        return f"{entry.name} is not a coroutine function"
    try:
        parameters = _parameters(entry, found, importer)
    except (TypeError, ValueError) as error:
        return f"{entry.name} has no signature ({error})"
    for name in entry.parameters:
        if name not in parameters or parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
            return f"{entry.name} has no parameter {name}"
    for name in entry.omitted:
        if parameters[name].default is inspect.Parameter.empty:
            return f"{entry.name} needs {name}"
    return _fields_mismatch(entry, parameters, importer) if entry.fields else ""


def _parameters(entry: Point, found: Any, importer: Importer) -> dict[str, inspect.Parameter]:
    """Parameters of ``found``; where it forwards ``**kwargs``, those of the overridden methods too."""
    parameters = dict(inspect.signature(found).parameters)
    if not _forwards(parameters):
        return parameters
    owner_name, _, method = entry.name.rpartition(".")
    owner, method = (found, "__init__") if inspect.isclass(found) else (resolve(owner_name, importer), method)
    for cls in getattr(owner, "__mro__", ()):
        if method in vars(cls):
            inherited = dict(inspect.signature(vars(cls)[method]).parameters)
            parameters = inherited | parameters
            if not _forwards(inherited):
                break
    return parameters


def _forwards(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _fields_mismatch(entry: Point, direct: Mapping[str, inspect.Parameter], importer: Importer) -> str:
    if not _forwards(direct):
        return f"{entry.name} takes no **kwargs"
    try:
        fields = resolve(entry.fields_of, importer).model_fields
    except Exception as error:
        # As in mismatch(): vendor code.
        return f"{entry.fields_of} is not there ({type(error).__name__}: {error})"
    missing = [name for name in entry.fields if name not in fields and name not in direct]
    return f"{entry.fields_of} has no field {missing[0]}" if missing else ""
