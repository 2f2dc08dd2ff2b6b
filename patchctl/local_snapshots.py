"""Snapshots of any process on this machine, kept under the home. Reads memory, writes none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from patchctl.errors import ExitCode, PatchctlError
from patchctl.snapshot_errors import explained
from snapshots.capture.process import capture_process
from snapshots.model import HostSnapshot
from snapshots.report import description, difference, process_snapshot, summary
from snapshots.store.manifest import Manifest
from snapshots.store.store import SnapshotStore

_SERVING = "the process, untouched"
_ROLE = "process"


class LocalSnapshots:
    """The verbs of ``patchctl snapshot`` for one store; all raise :class:`PatchctlError`."""

    def __init__(self, folder: Path) -> None:
        with explained(_SERVING):
            self._store = SnapshotStore(folder)

    def take(self, pid: int, label: str) -> dict[str, Any]:
        """Capture process ``pid`` and keep the snapshot."""
        with explained(_SERVING):
            stored = self._store.add(_capture(pid), label=label)
            return {
                **description(self._store.manifest(stored.id)),
                "new_bytes": stored.new_bytes,
                "evicted": list(stored.evicted),
            }

    def entries(self) -> list[dict[str, Any]]:
        """All snapshots, oldest first; a damaged one says so."""
        return list_entries(self._store)

    def show(self, identifier: str) -> dict[str, Any]:
        """One snapshot."""
        with explained(_SERVING):
            return description(self._store.manifest(identifier))

    def diff(self, before: str, after: str | None) -> dict[str, Any]:
        """Two snapshots, or one and the same process now."""
        with explained(_SERVING):
            first = self._store.manifest(before)
            old = self._store.snapshot(first)
            second = None if after is None else self._store.manifest(after)
            new = _capture(_pid(old)) if second is None else self._store.snapshot(second)
            return diff_report(first, second, old, new, roles=(_ROLE,))

    def verify(self) -> dict[str, Any]:
        """Re-hash everything."""
        return verification(self._store)

    def remove(self, identifier: str) -> dict[str, Any]:
        """Delete one snapshot."""
        with explained(_SERVING):
            self._store.remove(identifier)
        return {"removed": identifier}

    def restore(self, _identifier: str, _names: list[str], _generation: int | None) -> dict[str, Any]:
        """Refused: only the engine host restores, behind its own step boundary."""
        raise PatchctlError(
            code="restore.evidence_only",
            what="nothing was restored",
            why="a snapshot of any process is evidence only: writing its memory back would kill it",
            exit_code=ExitCode.USAGE,
            serving=_SERVING,
            next_command="patchctl snapshot restore ID --tensor NAME, without --local, on an engine host",
        )


def _capture(pid: int) -> HostSnapshot:
    return process_snapshot(capture_process(pid, _ROLE), taken_unix_ns=time.time_ns())


def _pid(snapshot: HostSnapshot) -> int:
    return snapshot.processes[_ROLE].pid


def list_entries(store: SnapshotStore) -> list[dict[str, Any]]:
    """The summary of every snapshot in a store, oldest first; a damaged one says so."""
    entries: list[dict[str, Any]] = []
    with explained(_SERVING):
        identifiers = store.identifiers()
    for identifier in identifiers:
        try:
            with explained(_SERVING):
                entries.append({**summary(store.manifest(identifier)), "damaged": ""})
        except PatchctlError as error:
            if error.code != "snapshot.unknown":  # removed meanwhile
                entries.append({"id": identifier, "damaged": error.why})
    return entries


def diff_report(
    first: Manifest, second: Manifest | None, old: HostSnapshot, new: HostSnapshot, *, roles: tuple[str, ...]
) -> dict[str, Any]:
    """The difference between two stored snapshots, or a stored one and ``new`` as it is now."""
    return {"before": first.id, "after": "now" if second is None else second.id, **difference(old, new, roles=roles)}


def verification(store: SnapshotStore) -> dict[str, Any]:
    """Re-hash a store.

    Raises:
        PatchctlError: ``snapshot.chunk_damaged`` (exit 5) when a snapshot is not whole.
    """
    with explained(_SERVING):
        found = store.verify()
    if found.damaged:
        raise PatchctlError(
            code="snapshot.chunk_damaged",
            what=f"{len(found.damaged)} of {found.snapshots} snapshots are damaged; the others are intact",
            why="; ".join(f"{damage.snapshot}: {damage.reason}" for damage in found.damaged),
            exit_code=ExitCode.SIGNATURE,
            serving="whatever served before: snapshots are not used to serve",
            next_command=f"patchctl snapshot remove {found.damaged[0].snapshot}; then check the disk",
        )
    return {"snapshots": found.snapshots, "chunks": found.chunks, "size_bytes": found.size_bytes}
