"""What a bundle says about its place in the log, tied to what the log signed. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from patchctl.trust.note import Checkpoint, parse_checkpoint

_HINT_BYTES: Final = 4
_REKOR_V1: Final = "0.0.1"


class _LogId(msgspec.Struct, frozen=True, rename="camel"):
    key_id: bytes


class _KindVersion(msgspec.Struct, frozen=True):
    version: str


class _Note(msgspec.Struct, frozen=True):
    envelope: str


class _Promise(msgspec.Struct, frozen=True, rename="camel"):
    signed_entry_timestamp: bytes


class _Proof(msgspec.Struct, frozen=True, rename="camel"):
    log_index: str
    root_hash: bytes
    tree_size: str
    checkpoint: _Note


class LogEntry(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a ``TransparencyLogEntry`` that say where and when. Unknown fields are sigstore's to refuse."""

    log_index: str
    log_id: _LogId
    kind_version: _KindVersion
    inclusion_proof: _Proof
    integrated_time: str | None = None
    inclusion_promise: _Promise | None = None

    @property
    def integrated_unix(self) -> int | None:
        """The log's own time, when a promise signs it (Rekor v1); else None.

        Raises:
            ValueError: one without the other: nothing would verify it.
        """
        time = int(self.integrated_time or "0")
        if (time != 0) != (self.inclusion_promise is not None):
            raise ValueError("integrated time and inclusion promise come together or not at all")
        return time or None


def read_entry(document: dict[str, Any]) -> LogEntry:
    """The one log entry of a parsed bundle.

    Raises:
        KeyError, TypeError, ValueError: not exactly one well-formed entry.
    """
    (entry,) = document["verificationMaterial"]["tlogEntries"]
    return msgspec.convert(entry, LogEntry)


def bound_index(entry: LogEntry) -> int:
    """The index at which the log proves the entry. Call it after the proof and the checkpoint verified.

    sigstore compares only root hashes; the size, the origin and the bundle's copy of the index could be
    anything. Under a promise (Rekor v1) the index is the one the promise signs, global over all shards.

    Raises:
        ValueError: the position is not the signed one.
    """
    proof = entry.inclusion_proof
    checkpoint = parse_checkpoint(proof.checkpoint.envelope)
    if str(checkpoint.size) != proof.tree_size or checkpoint.root_hash != proof.root_hash:
        raise ValueError("the inclusion proof is not for the tree in the checkpoint")
    _check_signer(checkpoint, entry)
    if entry.inclusion_promise is None and entry.log_index != proof.log_index:
        raise ValueError("the log index is not the proven one")
    return int(entry.log_index)


def _check_signer(checkpoint: Checkpoint, entry: LogEntry) -> None:
    """The log's signature line is the only one with its key hint and carries the origin's name."""
    hint = entry.log_id.key_id[:_HINT_BYTES]
    names = [signature.name for signature in checkpoint.signatures if signature.key_hint == hint]
    origin = checkpoint.origin
    if entry.kind_version.version == _REKOR_V1:
        origin = origin.partition(" - ")[0]  # v1 appends its tree id to the origin
    if names != [origin]:
        raise ValueError("the checkpoint is not signed once by its origin")
