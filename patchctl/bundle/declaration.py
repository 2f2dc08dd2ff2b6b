"""Does the author's declaration cover what the patch changes? A fact for the gate. Pure.

``build.json`` changes with every patch and needs no declaration.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from patchctl.bundle.config import Keep, PatchConfig, TensorDelta


class Undeclared(NamedTuple):
    """Changed files and tensors that no declaration covers, sorted."""

    files: tuple[str, ...]
    tensors: tuple[str, ...]

    @property
    def coverage(self) -> Literal["complete", "partial"]:
        """``complete`` when nothing is left undeclared."""
        return "partial" if self.files or self.tensors else "complete"


def undeclared(config: PatchConfig) -> Undeclared:
    """Compare actions and declaration.

    A file that is added, replaced whole or removed must be declared by its exact path. A replaced
    tensor must match a declared name or glob, unless its file is declared.
    """
    declared = config.declared
    files = set(config.removed) - set(declared.files)
    tensors: set[str] = set()
    for action in config.files:
        if isinstance(action, Keep) or action.path in declared.files:
            continue
        if isinstance(action, TensorDelta):
            tensors.update(
                change.name
                for change in action.tensors
                if not any(_matches(change.name, pattern) for pattern in declared.tensors)
            )
        else:
            files.add(action.path)
    return Undeclared(tuple(sorted(files)), tuple(sorted(tensors)))


def changed_files(config: PatchConfig) -> tuple[str, ...]:
    """Paths that are added, replaced, altered or removed, sorted."""
    altered = (action.path for action in config.files if not isinstance(action, Keep))
    return tuple(sorted((*altered, *config.removed)))


def changed_tensors(config: PatchConfig) -> tuple[str, ...]:
    """Names of the replaced tensors, sorted, each once."""
    return tuple(sorted({change.name for action in config.tensor_deltas for change in action.tensors}))


def _matches(name: str, pattern: str) -> bool:
    """Equality first: a name may itself contain glob characters."""
    return name == pattern or fnmatchcase(name, pattern)
