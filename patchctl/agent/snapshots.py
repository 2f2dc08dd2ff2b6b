"""The agent's side of ``patchctl snapshot``: what is taken, kept, compared and put back on this host."""

from __future__ import annotations

from typing import Any

from patchctl.agent.capture import Captured, capture_host, keep
from patchctl.agent.context import HostContext
from patchctl.agent.processes import ROLES
from patchctl.agent.repair import restore_tensors
from patchctl.errors import ExitCode, PatchctlError
from patchctl.local_snapshots import diff_report, list_entries, verification
from patchctl.snapshot_errors import explained
from snapshots.report import description

_SERVING = "the active generation, untouched"


class HostSnapshots:
    """Every method raises :class:`PatchctlError` and leaves what serves as it is."""

    def __init__(self, context: HostContext) -> None:
        self._context = context

    def take(self, label: str) -> dict[str, Any]:
        """Capture both processes with the tensors of every resident generation, and keep them."""
        captured = self._capture()
        stored = keep(self._context, captured, tuple(captured.tensors), label=label)
        return {**self.show(stored.id), "new_bytes": stored.new_bytes, "evicted": list(stored.evicted)}

    def entries(self) -> dict[str, Any]:
        """All snapshots, oldest first; a damaged one says so."""
        return {"snapshots": list_entries(self._context.snapshots)}

    def show(self, identifier: str) -> dict[str, Any]:
        """One snapshot."""
        with explained(_SERVING):
            return description(self._context.snapshots.manifest(identifier))

    def diff(self, before: str, after: str | None) -> dict[str, Any]:
        """Two snapshots, or one and this host now."""
        store = self._context.snapshots
        with explained(_SERVING):
            first = store.manifest(before)
            second = None if after is None else store.manifest(after)
            new = self._capture().snapshot if second is None else store.snapshot(second)
            return diff_report(first, second, store.snapshot(first), new, roles=ROLES)

    def verify(self) -> dict[str, Any]:
        """Re-hash everything."""
        return verification(self._context.snapshots)

    def remove(self, identifier: str) -> dict[str, Any]:
        """Delete one snapshot, unless the running transaction refers to it."""
        store = self._context.snapshots
        running = self._running()
        with explained(_SERVING):
            if running and any(
                store.manifest(one).transaction == running for one in store.identifiers() if one.startswith(identifier)
            ):
                raise _busy(running, "removed")
            store.remove(identifier)
        return {"removed": identifier}

    def restore(self, identifier: str, names: list[str], generation: int | None) -> dict[str, Any]:
        """Put named tensors back into the running engine; not while a transaction judges its memory."""
        if running := self._running():
            raise _busy(running, "restored")
        return restore_tensors(self._context, identifier, names, generation)

    def _capture(self) -> Captured:
        stats = self._context.host.engine_stats()
        resident = [(entry["generation"], entry["digest"]) for entry in stats["generations"] if entry["weights_digest"]]
        return capture_host(self._context, resident, serving=stats["active_generation"])

    def _running(self) -> str:
        return next((record.id for record in self._context.journal.history(1) if record.state == "running"), "")


def _busy(running: str, done: str) -> PatchctlError:
    return PatchctlError(
        code="snapshot.transaction_running",
        what=f"nothing was {done}",
        why=f"transaction {running} is running, and its verdict rests on this memory",
        exit_code=ExitCode.FENCED,
        serving=_SERVING,
        next_command="patchctl status",
    )
