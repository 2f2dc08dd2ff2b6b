"""State restore: stored tensors put back into the running engine.

The second line of defence. The first is the exchange back to a generation that stayed resident; but it goes back to
whatever that generation's memory holds. When that is not what was committed, or the exchange fails, its tensors are
restored from a stored snapshot. The third line replaces the process.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.wire import Restore, RestoreTensor
from patchctl.agent.capture import live_tensors
from patchctl.agent.context import HostContext
from patchctl.agent.evidence import committed_state
from patchctl.errors import ExitCode, PatchctlError
from patchctl.snapshot_errors import explained
from snapshots.capture.vmas import start_ticks
from snapshots.restore import LiveEngine, RestorePlan, RestoreRefusedError, plan_restore
from snapshots.store.errors import StoreError
from snapshots.store.store import SnapshotStore

_SERVING = "the active generation, untouched"
# Reading, hashing and copying a 16 GiB model at 1 GB/s, with room for a slow disk.
_RESTORE_S_MAX = 60.0


def restore_tensors(
    context: HostContext, identifier: str, names: Sequence[str], generation: int | None
) -> dict[str, Any]:
    """Restore named tensors of a resident generation (None: the active one) from a stored snapshot.

    Raises:
        PatchctlError: ``restore.*`` or ``engine.restore_*``; then nothing was changed, or the engine is replaced.
    """
    with context.host.undisturbed():
        number = context.host.active_generation if generation is None else generation
        live = _live_engine(context, number)
        with explained(_SERVING):
            manifest = context.snapshots.manifest(identifier)
            plan = plan_restore(manifest, names, live, committed_state(context, number))
            return {"snapshot": manifest.id, "generation": number, **_apply(context, plan)}


def repair(context: HostContext, generation: int) -> tuple[str, ...]:
    """Make the tensors of ``generation`` what they were when it was committed; returns the names put back.

    Raises:
        PatchctlError: ``restore.no_snapshot`` when no stored snapshot can, or what the engine answers.
    """
    try:
        return _repair(context, generation)
    except PatchctlError:
        raise
    except Exception as error:
        # The third line must follow whatever goes wrong in the second.
        raise _not_put_back(generation, f"{type(error).__name__}: {error}") from error


def _repair(context: HostContext, generation: int) -> tuple[str, ...]:
    committed = committed_state(context, generation)
    if committed is None:
        return ()
    live = _live_engine(context, generation)
    wrong = [name for name, digest in committed.items() if name in live.tensors and _differs(live, name, digest)]
    if not wrong:
        return ()
    reasons = []
    for identifier in reversed(context.snapshots.identifiers()):
        try:  # the newest that qualifies and is whole
            plan = plan_restore(context.snapshots.manifest(identifier), wrong, live, committed)
            _apply(context, plan)
        except (RestoreRefusedError, StoreError) as error:
            reasons.append(f"{identifier}: {error.why}")
            continue
        return tuple(one.name for one in plan.tensors)
    raise _not_put_back(generation, f"{wrong[0]} is spoiled; {reasons[0] if reasons else 'no snapshot is stored'}")


def _not_put_back(generation: int, why: str) -> PatchctlError:
    return PatchctlError(
        code="restore.no_snapshot",
        what=f"the tensors of generation {generation} were not put back",
        why=why,
        exit_code=ExitCode.ROLLED_BACK,
        serving="the committed build, as soon as the agent has replaced the engine process",
        next_command="patchctl history -o json",
    )


def _differs(live: LiveEngine, name: str, digest: str) -> bool:
    state = live.tensors[name].state
    return not state.alias and state.digest != digest


def _live_engine(context: HostContext, generation: int) -> LiveEngine:
    stats = context.host.engine_stats()
    resident = {entry["generation"]: entry["digest"] for entry in stats["generations"] if entry["weights_digest"]}
    if generation not in resident:
        raise PatchctlError(
            code="restore.not_resident",
            what="nothing was restored",
            why=f"generation {generation} is not resident; {', '.join(map(str, sorted(resident)))} are",
            exit_code=ExitCode.NOT_FOUND,
            serving=_SERVING,
            next_command="patchctl status",
        )
    pid = context.host.processes.pids.get("engine", 0)
    with explained(_SERVING):
        started = start_ticks(pid)
    tensors = live_tensors(context.host.inspect(generation))
    return LiveEngine(pid, started, generation, resident[generation], tensors)


def _apply(context: HostContext, plan: RestorePlan) -> dict[str, Any]:
    """Have the engine write what the plan says; a plan without work asks nothing.

    Raises:
        StoreError: the stored bytes are damaged, or there is no space to hand them over. Nothing was changed.
        PatchctlError: what the engine answers.
    """
    if not plan.tensors:
        return {"restored": [], "unchanged": len(plan.unchanged), "kv_dropped": []}
    with tempfile.NamedTemporaryFile(prefix="restore-", dir=context.home.host) as content:
        offsets = _write_content(context.snapshots, plan, Path(content.name))
        message = Restore(
            plan.generation,
            plan.build_digest,
            content.name,
            tuple(
                RestoreTensor(one.name, one.state.dtype, one.state.shape, one.address, one.state.chunks.hex(), offset)
                for one, offset in zip(plan.tensors, offsets, strict=True)
            ),
        )
        try:
            done = context.host.processes.link("engine").call(message, _RESTORE_S_MAX).data
        except PatchctlError as error:
            pid = context.host.processes.pids.get("engine")
            if error.code == "engine.restore_incomplete" and pid is not None:
                # Weights are neither what they were nor what they should be: nothing may be computed with them.
                os.kill(pid, signal.SIGKILL)
            raise
    return {**done, "unchanged": done["unchanged"] + len(plan.unchanged)}


def _write_content(store: SnapshotStore, plan: RestorePlan, path: Path) -> list[int]:
    """The bytes of all planned tensors, re-hashed as they are read; where each begins."""
    offsets = []
    try:
        with path.open("wb") as file:
            for one in plan.tensors:
                offsets.append(file.tell())
                for piece in store.read(one.content):
                    file.write(piece)
    except OSError as error:
        why = f"the stored bytes could not be handed to the engine: {error}"
        raise StoreError("restore.no_space", "nothing was restored", why, f"free space in {path.parent}") from error
    return offsets
