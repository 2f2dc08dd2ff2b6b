"""How a transaction ends: it commits on processes that lived through it, or it goes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchctl.agent.context import HostContext
from patchctl.agent.processes import Role
from patchctl.agent.repair import repair
from patchctl.errors import ExitCode, PatchctlError
from patchctl.transaction.runner import StepFunction, StepResult

# A process that was replaced has forgotten the generation.
_GONE_ALREADY = frozenset({"engine.not_ready", "front.generation_unknown", "host.process_gone", "host.down"})
_IN_USE = frozenset({"engine.generation_in_use", "front.generation_active"})


class Wholeness:
    """Notices that a process was lost since the transaction began to stage.

    Its memory evidence, its write tracking and the generation staged in it are gone then, so the
    transaction cannot be judged any more: it goes back, whichever process it was.
    """

    def __init__(self, context: HostContext) -> None:
        self._processes = context.host.processes
        self.begin()

    def begin(self) -> None:
        """Staging begins: what was lost before does not matter."""
        self._starts = self._processes.starts

    def check(self) -> None:
        """Raise when a process was lost.

        Raises:
            PatchctlError: ``host.process_lost``.
        """
        lost = self._processes.lost()
        replaced = {role: "replaced" for role, count in self._processes.starts.items() if count != self._starts[role]}
        if lost or replaced:
            raise _process_lost(lost or replaced)

    def around(self, step: StepFunction) -> StepFunction:
        """The step, refused when a process is lost before it or by its end."""

        def checked() -> StepResult:
            self.check()
            result = step()
            self.check()
            return result

        return checked


def _process_lost(roles: Mapping[Role, str]) -> PatchctlError:
    return PatchctlError(
        code="host.process_lost",
        what="the transaction did not go on",
        why="; ".join(f"the {role} process was lost meanwhile ({why})" for role, why in roles.items()),
        serving="the last committed build, as soon as the agent has replaced the process",
        next_command="patchctl history -o json",
    )


def commit(context: HostContext, wholeness: Wholeness, number: int, transaction: str, data: dict[str, Any]) -> None:
    """Make ``number`` the build this host serves, unless a process was lost or went back by itself.

    Raises:
        PatchctlError: ``host.process_lost``, or ``bake.breach`` when the engine ended the probation.
    """
    check_on_probation(context.host.engine_stats(), number)
    with context.host.undisturbed():
        wholeness.check()
        context.journal.commit_generation(number, transaction, data)


def check_on_probation(stats: Mapping[str, Any], number: int) -> None:
    """Raise when the engine exchanged back from ``number`` by itself.

    Raises:
        PatchctlError: ``bake.breach`` with the engine's reason.
    """
    if stats["active_generation"] == number:
        return
    breaches = [entry["breach"] for entry in stats["generations"] if entry["generation"] == number]
    raise PatchctlError(
        code="bake.breach",
        what="the new generation did not pass its probation",
        why=next(filter(None, breaches), f"the engine serves generation {stats['active_generation']} again"),
        exit_code=ExitCode.ROLLED_BACK,
        serving="the build that served before: the engine exchanged back by itself",
        next_command="patchctl history -o json",
    )


def go_back(context: HostContext, new: int, *, drain: bool = False) -> dict[str, Any]:
    """Serve the committed build and free ``new``.

    Raises:
        PatchctlError: the host serves nothing whole, a human must act.
    """
    restored = context.restore(drain=drain, repair=lambda number: repair(context, number))
    release_quietly(context, new)
    note = f"generation {context.host.active_generation} serves again"
    if restored.exchange:
        note += f", exchange {restored.exchange.get('exchange_us', 0):.0f} µs"
    if restored.repaired:
        note += f"; {len(restored.repaired)} tensors put back from a stored snapshot, first {restored.repaired[0]}"
    for role, why in restored.replaced.items():
        note += f"; {role} process replaced ({why})"
    return {
        "note": note,
        "generation": context.host.active_generation,
        "replaced": dict(restored.replaced),
        "repaired": list(restored.repaired),
        **restored.exchange,
    }


def release_after_commit(context: HostContext, generation: int) -> str:
    """Free the previous generation; returns a remark when it could not be freed.

    The journal names the new build by now, so nothing that happens here may undo the commit: a
    generation that stays resident costs memory until the next restart, no more. Should the engine have
    ended the probation in the last moment, the old generation is in use: then the journal is obeyed.
    """
    try:
        try:
            release_quietly(context, generation)
        except PatchctlError as error:
            if error.code not in _IN_USE:
                raise
            context.restore()
            release_quietly(context, generation)
    except Exception as error:
        return f"; generation {generation} is still resident ({type(error).__name__}: {error})"
    return ""


def release_quietly(context: HostContext, generation: int) -> None:
    """Free a generation that no longer matters; a process that died has freed it already."""
    try:
        context.host.release(generation)
    except PatchctlError as error:
        if error.code not in _GONE_ALREADY:
            raise
