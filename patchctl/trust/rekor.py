"""Log entries in Rekor v2's format. Pure.

A DSSE envelope is logged as a ``hashedrekord`` 0.0.2 over the digest of its pre-authentication encoding
(rekor-v2-spec, section 6.1.4, https://github.com/sigstore/rekor-tiles).
"""

from __future__ import annotations

import base64
from typing import Any, Final

import rfc8785

from patchctl.trust.log import Inclusion

_KIND: Final = "hashedrekord"
_VERSION: Final = "0.0.2"


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def entry_body(digest: bytes, signature: bytes, certificate: bytes) -> bytes:
    """Canonical body: sha256 ``digest`` (32 bytes) signed by the P-256 key of ``certificate`` (DER)."""
    verifier = {"keyDetails": "PKIX_ECDSA_P256_SHA_256", "x509Certificate": {"rawBytes": _base64(certificate)}}
    record: dict[str, Any] = {
        "data": {"algorithm": "SHA2_256", "digest": _base64(digest)},
        "signature": {"content": _base64(signature), "verifier": verifier},
    }
    return rfc8785.dumps({"apiVersion": _VERSION, "kind": _KIND, "spec": {"hashedRekordV002": record}})


def transparency_log_entry(body: bytes, inclusion: Inclusion, log_id: bytes) -> dict[str, Any]:
    """The ``TransparencyLogEntry`` message (protobuf JSON: 64-bit integers are strings)."""
    return {
        "logIndex": str(inclusion.index),
        "logId": {"keyId": _base64(log_id)},
        "kindVersion": {"kind": _KIND, "version": _VERSION},
        "inclusionProof": {
            "logIndex": str(inclusion.index),
            "rootHash": _base64(inclusion.root_hash),
            "treeSize": str(inclusion.size),
            "hashes": [_base64(node) for node in inclusion.hashes],
            "checkpoint": {"envelope": inclusion.checkpoint},
        },
        "canonicalizedBody": _base64(body),
    }
