"""One finding of a verdict, and how figures and names read in it. Pure."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Literal

Effect = Literal["unchanged", "expected", "growth", "corruption", "unknown"]

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was established, or could not be.

    Attributes:
        effect: its class.
        subject: what it is about, e.g. ``tensor model.embed`` or ``process front``.
        what: one sentence.
        before: figure before, "" if there is none.
        after: figure after, likewise.
        action: what a human can do about it, "" if nothing is needed.
    """

    effect: Effect
    subject: str
    what: str
    before: str = ""
    after: str = ""
    action: str = ""


def matches(name: str, globs: tuple[str, ...]) -> bool:
    """Whether a name is listed, or fits one of the globs; names may contain glob characters themselves."""
    return any(name == glob or fnmatch.fnmatchcase(name, glob) for glob in globs)


def size_text(value: float) -> str:
    """Bytes for a human: ``16.1 KiB``."""
    magnitude = abs(value)
    if magnitude >= _MIB:
        return f"{value / _MIB:.1f} MiB"
    if magnitude >= _KIB:
        return f"{value / _KIB:.1f} KiB"
    return f"{value:.0f} B"
