"""Errors as an operator reads them: code, what, why, what still serves, the next command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from patchctl.errors import PatchctlError

# What to run next after a refusal by a part that does not know which command it served.
_NEXT_BY_AREA = {
    "build": "patchctl build --help",
    "gate": "patchctl policy check --help",
    "patch": "patchctl inspect FILE",
    "policy": "patchctl policy check --help",
    "snapshot": "patchctl snapshot probe",
    "store": "patchctl status",
    "trust": "patchctl trust show",
}


def complete(error: PatchctlError) -> PatchctlError:
    """The error with every part said, for a command that involves no engine host."""
    area = error.code.partition(".")[0]
    return replace(
        error,
        serving=error.serving or "whatever served before: this command changes no engine host",
        next_command=error.next_command or _NEXT_BY_AREA.get(area, "patchctl --help"),
    )


def print_error(error: PatchctlError, *, as_json: bool) -> None:
    """Write ``error`` to stderr, as text or as one JSON object."""
    error = complete(error)
    if as_json:
        print(json.dumps({"error": error.as_dict()}), file=sys.stderr)
        return
    lines = [f"error {error.code}"]
    for label, text in (
        ("what", error.what),
        ("why", error.why),
        ("serving", error.serving),
        ("next", error.next_command),
    ):
        lines.append(f"  {label:<8} {text}")
    print("\n".join(lines), file=sys.stderr)
