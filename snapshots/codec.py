"""Snapshots as JSON: schema version 1, strict in both directions."""

from __future__ import annotations

from typing import Literal

import msgspec

from snapshots.model import HostSnapshot

# A 4 GiB process hashed in full packs 16 bytes per page, a third more in base64: 23 MiB. Eight of those.
SNAPSHOT_BYTES_MAX = 256 << 20


class SnapshotInvalidError(ValueError):
    """The bytes are not a snapshot of this schema version."""


class SnapshotFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file format: the snapshot, and the version of its schema."""

    snapshot: HostSnapshot
    schema_version: Literal[1] = 1


def encode_snapshot(snapshot: HostSnapshot) -> bytes:
    """The snapshot as JSON; binary fields are base64. Same snapshot, same bytes."""
    return msgspec.json.encode(SnapshotFile(snapshot), order="deterministic")


def decode_snapshot(raw: bytes) -> HostSnapshot:
    """Parse what :func:`encode_snapshot` wrote, and nothing else.

    Raises:
        SnapshotInvalidError: too large, malformed, another schema version, unknown or missing fields, or
            values that break the model's rules.
    """
    if len(raw) > SNAPSHOT_BYTES_MAX:
        raise SnapshotInvalidError(f"a snapshot of {len(raw)} bytes; the limit is {SNAPSHOT_BYTES_MAX}")
    try:
        file = msgspec.json.decode(raw, type=SnapshotFile)
        # msgspec ignores unknown fields of dataclasses; a document equal to its own re-encoding has none.
        if msgspec.json.decode(encode_snapshot(file.snapshot)) != msgspec.json.decode(raw):
            raise SnapshotInvalidError("unknown or missing fields")
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SnapshotInvalidError(f"not a snapshot: {error}") from error
    return file.snapshot
