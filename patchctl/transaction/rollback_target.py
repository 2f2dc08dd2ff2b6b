"""Which generation a rollback returns to. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from patchctl.errors import ExitCode, PatchctlError
from patchctl.journal.record import GenerationRecord


def choose_target(
    generations: Sequence[GenerationRecord], active: GenerationRecord, to: int | None
) -> GenerationRecord:
    """The generation to return to.

    Without a name it is the build first committed before the active build was: a second rollback so
    goes further back, and never toggles to the build the first one left.

    Raises:
        PatchctlError: ``rollback.no_target`` (exit 3) with the generations that can be named.
    """
    committed = [entry for entry in generations if entry.committed_unix_ns is not None]
    first: dict[str, GenerationRecord] = {}
    for entry in committed:
        first.setdefault(entry.digest, entry)
    if to is None:
        earlier = [entry for entry in first.values() if entry.number < first[active.digest].number]
        if earlier:
            return max(earlier, key=lambda entry: entry.number)
        why = "no build was committed before the active one"
    else:
        for entry in committed:
            if entry.number == to and entry.digest != active.digest:
                return entry
        why = f"generation {to} is not a committed build other than the active one"
    names = ", ".join(f"{entry.number} ({entry.version})" for entry in committed if entry.digest != active.digest)
    raise PatchctlError(
        code="rollback.no_target",
        what="nothing was rolled back",
        why=f"{why}; generations to choose from: {names or 'none'}",
        exit_code=ExitCode.NOT_FOUND,
        serving=f"generation {active.number} ({active.version}), untouched",
        next_command="patchctl status",
    )
