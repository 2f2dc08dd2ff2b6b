"""Verify one attestation: the procedure, in the order it runs.

Nothing is fetched: everything needed is in the line and in the trusted roots the caller has pinned. sigstore
(half a second of CPU) is imported on first use.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from patchctl.errors import PatchctlError
from patchctl.trust import strictjson
from patchctl.trust.document import check_shape
from patchctl.trust.refusal import fail_closed, printable, refusal
from patchctl.trust.statement import PAYLOAD_TYPE, HotfixPredicate, decode_statement

if TYPE_CHECKING:
    from patchctl.trust.material import VerifiedMaterial

# A bundle with the largest statement has 0.7 MiB; this bounds what an attacker can make us parse.
LINE_BYTES_MAX: Final = 1 << 20
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_WHAT: Final = "the attestation was not accepted"


@dataclass(frozen=True, slots=True)
class VerifiedStatement:
    """Facts that were verified, and no others; a policy may decide on them.

    Attributes:
        domain: name of the trust domain whose root verified it.
        issuer: who vouched for ``identity``; unique only together with ``domain``.
        identity: the e-mail address or URI the certificate names.
        signed_at_unix: earliest trusted time of the signature, seconds since the epoch.
        log_index: proven position in the domain's transparency log.
        timestamp_status: who dated the signature.
        bundle_sha256: hex digest of the line as read. The same signature can be written in several ways:
            count identities, never bundles.
    """

    domain: str
    issuer: str
    identity: str
    signed_at_unix: int
    log_index: int
    log_status: Literal["included"]
    timestamp_status: Literal["timestamp_authority", "transparency_log"]
    subject_name: str
    subject_sha256: str
    predicate: HotfixPredicate
    bundle_sha256: str


def verify_attestation(roots: Mapping[str, str], line: bytes, expected_subject_sha256: str) -> VerifiedStatement:
    """Verify one line of ``*.sigstore.jsonl``.

    Args:
        roots: trusted root JSON by domain name. Domains are tried in this order, each alone: any authority
            of a root may mint any issuer, so roots are never merged.
        line: the bundle.
        expected_subject_sha256: 64 lower-case hex digits, the digest of the patch file's manifest as the
            caller computed it.

    Raises:
        PatchctlError: ``trust.*``, exit code SIGNATURE. Nothing else is raised, whatever the input.
    """
    with fail_closed("internal", _WHAT):
        # (1) Cap the size before anything reads it.
        if len(line) > LINE_BYTES_MAX:
            raise refusal("too_large", _WHAT, f"it has {len(line)} bytes, more than {LINE_BYTES_MAX}")
        if not _HEX64.match(expected_subject_sha256):
            raise refusal("subject_malformed", _WHAT, "the expected digest is not 64 lower-case hex digits")

        # (2) Parse: JSON without duplicate keys, and a bundle of the one accepted shape.
        with fail_closed("bundle_malformed", _WHAT):
            check_shape(strictjson.loads(line))

        # (3) Cryptography, per domain, offline: timestamp, certificate chain, SCT, inclusion in the log,
        # checkpoint, signature, all by keys valid at signing time; log position; issuer within its domain.
        domain, material = _first_domain(roots, line)

        # (4) The payload is an in-toto statement ...
        if material.payload_type != PAYLOAD_TYPE:
            why = f"the payload type is {printable(material.payload_type)!r}, not {PAYLOAD_TYPE}"
            raise refusal("payload_type", _WHAT, why)

        # (5) ... canonical JSON of known fields, of a predicate type this version knows ...
        statement = decode_statement(material.payload)

        # (6) ... about this patch file.
        if statement.subject_sha256 != expected_subject_sha256:
            why = f"it is about sha256:{statement.subject_sha256}, not sha256:{expected_subject_sha256}"
            raise refusal("subject_mismatch", _WHAT, why)

        return VerifiedStatement(
            domain=domain,
            issuer=material.signer.issuer,
            identity=material.signer.identity,
            signed_at_unix=material.signed_at_unix,
            log_index=material.log_index,
            log_status="included",
            timestamp_status=material.time_source,
            subject_name=statement.subject_name,
            subject_sha256=statement.subject_sha256,
            predicate=statement.predicate,
            bundle_sha256=hashlib.sha256(line).hexdigest(),
        )


def _first_domain(roots: Mapping[str, str], line: bytes) -> tuple[str, VerifiedMaterial]:
    """The first domain whose root verifies the bundle, and what it proves.

    A root that does not parse refuses at once: skipping it would let damage choose the domain.
    """
    from patchctl.trust.material import root_verifier

    refused: list[tuple[str, PatchctlError]] = []
    for name, root in roots.items():
        verifier = root_verifier(root)
        try:
            return name, verifier.verify(line)
        except PatchctlError as error:
            refused.append((name, error))
    if not refused:
        why, command = "no trust domain is configured", "patchctl trust init"
        raise refusal("no_domain", _WHAT, why, next_command=command)
    if len(refused) == 1:
        raise refused[0][1]
    why = "; ".join(f"{name}: {error.code}: {error.why}" for name, error in refused)
    raise refusal("no_domain_accepts", _WHAT, why)


def require_identity(verified: VerifiedStatement, *, domain: str, issuer: str, identity: str) -> None:
    """Refuse unless exactly this identity signed. All three are compulsory and compared exactly.

    Raises:
        PatchctlError: ``trust.identity_mismatch``.
    """
    expected, actual = (domain, issuer, identity), (verified.domain, verified.issuer, verified.identity)
    if expected != actual:
        names = ("domain", "issuer", "identity")
        why = "; ".join(
            f"{name} is {got}, not {printable(want)}"
            for name, want, got in zip(names, expected, actual, strict=True)
            if want != got
        )
        raise refusal("identity_mismatch", "the signer is not the expected one", why)
