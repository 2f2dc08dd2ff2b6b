"""Input files of commands that cannot be read, explained."""

from __future__ import annotations

from pathlib import Path

from patchctl.errors import ExitCode, PatchctlError


def unreadable(path: Path, error: OSError) -> PatchctlError:
    """The error for an input file that cannot be read."""
    missing = isinstance(error, FileNotFoundError)
    return PatchctlError(
        code="input.missing" if missing else "input.unreadable",
        what=f"cannot read {path}",
        why=error.strerror or str(error),
        exit_code=ExitCode.NOT_FOUND if missing else ExitCode.USAGE,
        serving="the active generation, untouched",
        next_command=f"ls -l {path}",
    )
