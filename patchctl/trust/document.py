"""The one shape of bundle accepted as an attestation: v0.3, one certificate, one log entry, one DSSE signature.

The Sigstore format has older versions, alternatives and hints that no signature covers. Here there is no
room for any of them. Binary values are base64; msgspec refuses a malformed one. Light: no sigstore.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class _Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class _Certificate(_Strict):
    raw_bytes: bytes


class _LogId(_Strict):
    key_id: bytes


class _KindVersion(_Strict):
    kind: str
    version: str


class _Checkpoint(_Strict):
    envelope: str


class _InclusionProof(_Strict):
    log_index: str
    root_hash: bytes
    tree_size: str
    hashes: tuple[bytes, ...]
    checkpoint: _Checkpoint


class _InclusionPromise(_Strict):
    signed_entry_timestamp: bytes


class _LogEntry(_Strict):
    log_index: str
    log_id: _LogId
    kind_version: _KindVersion
    inclusion_proof: _InclusionProof
    canonicalized_body: bytes
    integrated_time: str | None = None
    inclusion_promise: _InclusionPromise | None = None


class _Timestamp(_Strict):
    signed_timestamp: bytes


class _Timestamps(_Strict):
    rfc3161_timestamps: tuple[_Timestamp, ...] = ()


class _Material(_Strict):
    certificate: _Certificate
    tlog_entries: tuple[_LogEntry, ...]
    timestamp_verification_data: _Timestamps | None = None


class _Signature(_Strict):
    sig: bytes
    keyid: Literal[""] = ""  # a hint no signature covers


class _Envelope(_Strict):
    payload: bytes
    payload_type: str
    signatures: tuple[_Signature, ...]


class _Bundle(_Strict):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: _Envelope


def check_shape(document: Any) -> None:
    """Check a parsed bundle.

    Raises:
        ValueError: it has another shape.
    """
    bundle = msgspec.convert(document, _Bundle)
    if len(bundle.verification_material.tlog_entries) != 1 or len(bundle.dsse_envelope.signatures) != 1:
        raise ValueError("expected exactly one log entry and one signature")
