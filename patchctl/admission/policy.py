"""A policy: Rego modules and their data, read once, checked on load, named by digests of canonical content.

Folder layout is OPA's own (``*.rego`` anywhere, ``data.json`` rooted at its folder, ``*_test.rego`` are
tests), so ``opa test -b policies`` and ``opa build -b policies`` work on the same files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
import rfc8785

from patchctl.admission.config import GateConfig
from patchctl.admission.lint import lint_module, package_of
from patchctl.errors import ExitCode, PatchctlError

DATA_NAME = "data.json"
ROOT = "patchctl"  # the one package and data root we use: a shared OPA server holds other tenants' too
CONFIG_PATH = (ROOT, "config")
FILE_BYTES_MAX = 1 << 20  # our largest module has 6 KiB
FILES_MAX = 256


def sha256_digest(raw: bytes) -> str:
    """``sha256:<64 hex>`` of ``raw``."""
    return "sha256:" + hashlib.sha256(raw).hexdigest()


@dataclass(frozen=True, slots=True)
class Module:
    """One Rego file; ``name`` is its path in the policy folder, ``source`` its text."""

    name: str
    source: str


@dataclass(frozen=True)
class PolicySet:
    """Modules and data that passed :func:`check_policy`; immutable.

    Attributes:
        modules: Rego modules sorted by name, without tests.
        data_json: canonical JSON (RFC 8785) of the data document.
        tests: Rego test modules; never part of a decision and of no digest.
    """

    modules: tuple[Module, ...]
    data_json: bytes
    tests: tuple[Module, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """A fresh copy of the data document."""
        parsed: dict[str, Any] = json.loads(self.data_json)
        return parsed

    @cached_property
    def policy_digest(self) -> str:
        """Digest of the modules: names and texts."""
        return sha256_digest(rfc8785.dumps({module.name: module.source for module in self.modules}))

    @cached_property
    def data_digest(self) -> str:
        """Digest of the data."""
        return sha256_digest(self.data_json)

    @cached_property
    def revision(self) -> str:
        """Digest of both: equal revisions decide equally."""
        return sha256_digest(f"{self.policy_digest} {self.data_digest}".encode())

    def with_data(self, overrides: Mapping[str, Any]) -> PolicySet:
        """The same rules under other settings: ``overrides`` merged into ``data.patchctl.config`` (RFC 7396).

        Raises:
            PatchctlError: ``policy.invalid``, e.g. a misspelt or removed setting.
        """
        patch: Any = overrides
        for key in reversed(CONFIG_PATH):
            patch = {key: patch}
        changed = replace(self, data_json=_canonical(_merge(self.data, patch), "overrides"))
        if problems := _data_problems(changed):
            raise invalid("; ".join(problems))
        return changed


def invalid(why: str) -> PatchctlError:
    """The refusal of a policy that may not be used."""
    return PatchctlError(
        code="policy.invalid",
        what="the policy was not loaded, so nothing can be admitted with it",
        why=why,
        exit_code=ExitCode.POLICY_DENIED,
    )


def check_policy(policy: PolicySet) -> PolicySet:
    """Return ``policy`` when its modules are portable and its data neither shadows a rule nor breaks the schema.

    Raises:
        PatchctlError: ``policy.invalid`` with every finding.
    """
    problems = [
        f"{module.name}:{finding.line}: {finding.message}"
        for module in policy.modules + policy.tests
        for finding in lint_module(module.source, test=module in policy.tests)
    ]
    if not policy.modules:
        problems.append("there is no Rego module")
    problems += [
        f"{module.name}: its package is not below {ROOT}"
        for module in policy.modules
        if package_of(module.source)[:1] != (ROOT,)
    ]
    problems += _data_problems(policy)
    if problems:
        raise invalid("; ".join(problems))
    return policy


def _data_problems(policy: PolicySet) -> list[str]:
    data = policy.data
    foreign = [] if data.keys() == {ROOT} else [f"the data's only root must be {ROOT}"]
    return foreign + _overlaps(policy, data) + _settings(data)


def _overlaps(policy: PolicySet, data: dict[str, Any]) -> list[str]:
    """Data inside a package: one engine would let it replace the rule of that name."""
    problems = []
    for module in policy.modules:
        node: Any = data
        path = package_of(module.source)
        for key in path:
            if not isinstance(node, dict) or key not in node:
                break
            node = node[key]
        else:
            problems.append(f"data overlaps package {'.'.join(path)} of {module.name}")
        if not isinstance(node, dict):
            problems.append(f"data overlaps a parent of package {'.'.join(path)} of {module.name}")
    return problems


def _settings(data: dict[str, Any]) -> list[str]:
    node: Any = data
    for key in CONFIG_PATH:
        node = node.get(key) if isinstance(node, dict) else None
    try:
        config = msgspec.convert(node, type=GateConfig, strict=True)
    except msgspec.ValidationError as error:
        return [f"data.{'.'.join(CONFIG_PATH)}: {error}"]
    missing = {"production", "staging", "lab"} - config.environments.keys()
    return [f"data.{'.'.join(CONFIG_PATH)}: environment {name!r} is missing" for name in sorted(missing)]


def _merge(target: Any, patch: Any) -> Any:
    """JSON Merge Patch (RFC 7396): null removes, objects merge, everything else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _canonical(data: Any, origin: str) -> bytes:
    try:
        return rfc8785.dumps(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise invalid(f"{origin}: {error}") from error


def _no_float(text: str) -> float:
    raise ValueError(f"number {text} is not an integer")


def _read(entry: Traversable, name: str) -> str:
    with entry.open("rb") as stream:
        raw = stream.read(FILE_BYTES_MAX + 1)
    if len(raw) > FILE_BYTES_MAX:
        raise ValueError(f"{name} has more than {FILE_BYTES_MAX} bytes")
    return raw.decode("utf-8")


def _walk(folder: Traversable, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Traversable]]:
    found = []
    for entry in folder.iterdir():
        path = (*prefix, entry.name)
        if isinstance(entry, Path) and entry.is_symlink():
            raise ValueError(f"{'/'.join(path)} is a link")
        if entry.is_dir():
            found += _walk(entry, path)
        elif entry.name.endswith(".rego") or entry.name == DATA_NAME:
            found.append((path, entry))
    if len(found) > FILES_MAX:
        raise ValueError(f"more than {FILES_MAX} files")
    return found


def _load(root: Traversable) -> PolicySet:
    modules: list[Module] = []
    tests: list[Module] = []
    data: Any = {}
    try:
        for path, entry in sorted(_walk(root), key=lambda found: found[0]):
            name = "/".join(path)
            text = _read(entry, name)
            if entry.name == DATA_NAME:
                document = json.loads(text, parse_float=_no_float, parse_constant=_no_float)
                for key in reversed(path[:-1]):
                    document = {key: document}
                data = _merge(data, document)
            else:
                (tests if name.endswith("_test.rego") else modules).append(Module(name, text))
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(str(error)) from error
    return check_policy(PolicySet(tuple(modules), _canonical(data, DATA_NAME), tuple(tests)))


def load_default() -> PolicySet:
    """The policies shipped with patchctl. Their list of allowed identities is empty: add yours with ``with_data``.

    Raises:
        PatchctlError: ``policy.invalid``: the installation was altered.
    """
    return _load(files("policies"))


def load_folder(path: Path) -> PolicySet:
    """A policy from a folder in OPA's layout.

    Raises:
        PatchctlError: ``policy.invalid``: unreadable, a link, too large, not portable, or data overlaps rules.
    """
    return _load(path)
