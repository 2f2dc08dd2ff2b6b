"""What can go wrong with stored snapshots, and what a human can do about it."""

from __future__ import annotations


class StoreError(Exception):
    """A stored snapshot could not be written, read or trusted.

    Attributes:
        code: stable dotted identifier, e.g. ``snapshot.disk_full``.
        what: one sentence, what did not happen.
        why: one sentence, the cause.
        action: what to do about it.
    """

    def __init__(self, code: str, what: str, why: str, action: str) -> None:
        super().__init__(f"{code}: {what} ({why})")
        self.code = code
        self.what = what
        self.why = why
        self.action = action


def damaged_manifest(identifier: str, why: str) -> StoreError:
    """A manifest that cannot be trusted."""
    return StoreError(
        "snapshot.manifest_damaged",
        f"snapshot {identifier} cannot be read",
        why,
        f"patchctl snapshot remove {identifier}; the other snapshots are intact",
    )


def damaged_chunk(name: str, why: str) -> StoreError:
    """A chunk that is not what its name says."""
    return StoreError(
        "snapshot.chunk_damaged",
        f"chunk {name[:12]} cannot be used",
        why,
        "patchctl snapshot verify names the snapshots it belongs to; check the disk",
    )


def unknown_snapshot(identifier: str, why: str) -> StoreError:
    """No snapshot of that name."""
    return StoreError("snapshot.unknown", f"there is no snapshot {identifier!r}", why, "patchctl snapshot list")
