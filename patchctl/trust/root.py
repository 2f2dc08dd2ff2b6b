"""The trusted root of a local domain: the public half, as the file every Sigstore client reads. Pure.

Format: TrustedRoot v0.1,
https://github.com/sigstore/protobuf-specs/blob/main/protos/sigstore_trustroot.proto.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import rfc8785

# .invalid never resolves (RFC 2606): nobody can run a service under a local domain's name.
LOCAL_HOST: Final = "local.patchctl.invalid"
LOCAL_ISSUER_PREFIX: Final = f"https://{LOCAL_HOST}/"
# 128 bits of the fingerprint: no second key can be made to match.
_FINGERPRINT_CHARS: Final = 32
_MEDIA_TYPE: Final = "application/vnd.dev.sigstore.trustedroot+json;version=0.1"


def local_issuer(fingerprint: str) -> str:
    """The only issuer a local domain may name; ``fingerprint`` is the hex sha256 of its root certificate's SPKI."""
    return LOCAL_ISSUER_PREFIX + fingerprint[:_FINGERPRINT_CHARS]


def log_origin(fingerprint: str) -> str:
    """The checkpoint origin of a local domain's log."""
    return f"{LOCAL_HOST}/{fingerprint[:_FINGERPRINT_CHARS]}/log"


@dataclass(frozen=True, slots=True)
class RootParts:
    """Public material of one domain; keys and certificates in DER, chains leaf to root.

    Attributes:
        log_id: key id of the log's note signer, 32 bytes.
        since_unix: when the material became valid.
    """

    name: str
    fingerprint: str
    since_unix: int
    signing_chain: tuple[bytes, ...]
    timestamp_chain: tuple[bytes, ...]
    ctlog_key: bytes
    log_key: bytes
    log_id: bytes


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def trusted_root_json(parts: RootParts) -> str:
    """Canonical JSON (RFC 8785): the same domain always gives the same bytes."""
    valid_for = {"start": datetime.fromtimestamp(parts.since_unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}

    def log(base_url: str, key: bytes, details: str, key_id: bytes) -> dict[str, Any]:
        return {
            "baseUrl": base_url,
            "hashAlgorithm": "SHA2_256",
            "publicKey": {"rawBytes": _base64(key), "keyDetails": details, "validFor": valid_for},
            "logId": {"keyId": _base64(key_id)},
        }

    def authority(common_name: str, chain: tuple[bytes, ...]) -> dict[str, Any]:
        return {
            "subject": {"organization": parts.name, "commonName": common_name},
            "uri": local_issuer(parts.fingerprint),
            "certChain": {"certificates": [{"rawBytes": _base64(certificate)} for certificate in chain]},
            "validFor": valid_for,
        }

    origin = log_origin(parts.fingerprint)
    ctlog_id = hashlib.sha256(parts.ctlog_key).digest()
    root: dict[str, Any] = {
        "mediaType": _MEDIA_TYPE,
        "tlogs": [log(f"https://{origin}", parts.log_key, "PKIX_ED25519", parts.log_id)],
        "certificateAuthorities": [authority("root", parts.signing_chain)],
        "ctlogs": [log(f"https://{origin}/ct", parts.ctlog_key, "PKIX_ECDSA_P256_SHA_256", ctlog_id)],
        "timestampAuthorities": [authority("tsa-root", parts.timestamp_chain)],
    }
    return rfc8785.dumps(root).decode()
