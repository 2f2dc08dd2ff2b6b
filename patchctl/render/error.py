"""Errors as an operator reads them: code, what, why, what still serves, the next command."""

from __future__ import annotations

import json
import sys

from patchctl.errors import PatchctlError


def print_error(error: PatchctlError, *, as_json: bool) -> None:
    """Write ``error`` to stderr, as text or as one JSON object."""
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
        if text:
            lines.append(f"  {label:<8} {text}")
    print("\n".join(lines), file=sys.stderr)
