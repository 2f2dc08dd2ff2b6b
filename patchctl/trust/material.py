"""The cryptographic half of verification: one bundle against one trusted root, offline.

sigstore-python 4.5 does the cryptography; this module gives it only keys that were valid at signing time and
ties the positions it leaves unchecked. Importing it costs half a second: see :mod:`patchctl.trust.verify`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.hazmat import asn1
from sigstore.hashes import Hashed
from sigstore.models import Bundle, TrustedRoot
from sigstore.verify import Verifier
from sigstore_models.common.v1 import HashAlgorithm, TimeRange
from sigstore_models.trustroot.v1 import TrustedRoot as TrustedRootMessage

from patchctl.trust import strictjson
from patchctl.trust.certificates import ISSUER_V1_OID, ISSUER_V2_OID
from patchctl.trust.keys import spki_sha256
from patchctl.trust.position import bound_index, read_entry
from patchctl.trust.refusal import fail_closed, refusal
from patchctl.trust.root import LOCAL_ISSUER_PREFIX, local_issuer
from patchctl.trust.times import SigningTime, Source, signing_times

# The public-good root has 8 KiB; a private one with every key ever used stays far below.
ROOT_BYTES_MAX: Final = 1 << 20
_WHAT: Final = "the attestation was not accepted"


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signed: the only name in the certificate, and the issuer that vouched for it."""

    issuer: str
    identity: str


@dataclass(frozen=True, slots=True)
class VerifiedMaterial:
    """What a bundle proves, whatever its payload means.

    Attributes:
        signed_at_unix: the earliest trusted time; ``time_source`` says whose.
        log_index: proven position in the log.
        payload_type, payload: the DSSE content; empty for a bundle over an artifact.
    """

    signer: Signer
    signed_at_unix: int
    time_source: Source
    log_index: int
    payload_type: str
    payload: bytes


class _SignerReader:
    """A sigstore policy that reads the certificate sigstore is verifying; matching is the gate's business."""

    signer: Signer | None = None

    def verify(self, cert: x509.Certificate) -> None:
        self.signer = Signer(_issuer(cert), _identity(cert))


def _issuer(certificate: x509.Certificate) -> str:
    values: set[str] = set()
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.UnrecognizedExtension):
            if extension.oid == ISSUER_V1_OID:
                values.add(extension.value.value.decode())
            elif extension.oid == ISSUER_V2_OID:
                values.add(asn1.decode_der(str, extension.value.value))
    if len(values) != 1:
        raise ValueError("the certificate does not name exactly one issuer")
    return _visible(values.pop())


def _identity(certificate: x509.Certificate) -> str:
    names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    if len(names) != 1 or not isinstance(names[0], x509.RFC822Name | x509.UniformResourceIdentifier):
        raise ValueError("the certificate does not name exactly one e-mail address or URI")
    return _visible(names[0].value)


def _visible(text: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("an identity or issuer is not printable ASCII without spaces")
    return text


def _within(period: TimeRange | None, times: Iterable[datetime]) -> bool:
    """Both ends belong to the period; no period means "always", as in the Sigstore specification."""
    return period is None or all(period.start <= at and (period.end is None or at <= period.end) for at in times)


class RootVerifier:
    """Verifies bundles against one trusted root; roots are never merged."""

    def __init__(self, root_json: str) -> None:
        """Parse the root.

        Raises:
            PatchctlError: ``trust.root_invalid``.
        """
        with fail_closed("root_invalid", "the trusted root was not accepted"):
            raw = root_json.encode()
            if len(raw) > ROOT_BYTES_MAX:
                raise ValueError(f"it has {len(raw)} bytes, more than {ROOT_BYTES_MAX}")
            strictjson.loads(raw)
            self._message = TrustedRootMessage.from_json(raw)
            self._root = TrustedRoot(self._message)
            # Fails on an empty or unreadable part of the root now, not at the first deploy.
            Verifier(trusted_root=self._root)
            self._local_issuers = {
                local_issuer(_fingerprint(authority.cert_chain.certificates[-1].raw_bytes))
                for authority in self._message.certificate_authorities
            }
            self._is_local = any(
                (authority.uri or "").startswith(LOCAL_ISSUER_PREFIX)
                for authority in self._message.certificate_authorities
            )
            # A root has a handful of validity boundaries, hence few distinct subsets of valid keys.
            self._verifier_for = lru_cache(maxsize=16)(self._build_verifier)

    def verify(self, raw: bytes, artifact_sha256: bytes | None = None) -> VerifiedMaterial:
        """Verify one bundle, of any version sigstore reads.

        Args:
            raw: the bundle's JSON; the caller bounds its size.
            artifact_sha256: the digest a bundle over a bare artifact must be for. patchctl accepts none of
                these as attestations; the public conformance corpus is full of them.

        Raises:
            PatchctlError: ``trust.bundle_malformed``, ``trust.timestamp_invalid``, ``trust.signature_invalid``,
                ``trust.log_position`` or ``trust.identity_foreign``.
        """
        # (1) Parse once with sigstore and once strictly: what it understood must be all that is written.
        # Its base64 skips foreign characters and its integers may be padded; neither survives this.
        with fail_closed("bundle_malformed", _WHAT):
            document = strictjson.loads(raw)
            bundle = Bundle.from_json(raw)
            if strictjson.loads(bundle.to_json().encode()) != document:
                raise ValueError("a value is not in its canonical spelling")
            entry = read_entry(document)

        # (2) Trusted times of the signature.
        with fail_closed("timestamp_invalid", _WHAT):
            times = signing_times(self._root, bundle, entry.integrated_unix)
            first = min(times, key=lambda time: time.at)  # raises, hence refuses, when there is none

        # (3) Certificate chain, SCT, log inclusion, checkpoint, signature and log entry body, by sigstore, which
        # is shown only the keys that were valid at all those times, and of the logs only the one named.
        reader = _SignerReader()
        with fail_closed("signature_invalid", _WHAT):
            verifier = self._verifier_for(self._valid_keys(bundle, times, entry.log_id.key_id))
            payload_type, payload = "", b""
            if artifact_sha256 is None:
                payload_type, payload = verifier.verify_dsse(bundle, reader)
            else:
                hashed = Hashed(algorithm=HashAlgorithm.SHA2_256, digest=artifact_sha256)
                verifier.verify_artifact(hashed, bundle, reader)
            if reader.signer is None:
                raise ValueError("sigstore did not ask who signed")

        # (4) Position in the log: index, size and origin are the signed ones.
        with fail_closed("log_position", _WHAT):
            log_index = bound_index(entry)

        # (5) A local domain speaks for itself alone, and nobody else speaks for it.
        self._check_issuer(reader.signer.issuer)
        return VerifiedMaterial(
            reader.signer, int(first.at.timestamp()), first.source, log_index, payload_type, payload
        )

    def _valid_keys(self, bundle: Bundle, times: list[SigningTime], log_id: bytes) -> tuple[tuple[int, ...], ...]:
        """Indexes into the root of the authorities, CT logs and log that may be used; sigstore ignores most ends."""
        at = [time.at for time in times]
        scts = bundle.signing_certificate.extensions.get_extension_for_class(
            x509.PrecertificateSignedCertificateTimestamps
        ).value
        certified = [*at, *(sct.timestamp.replace(tzinfo=UTC) for sct in scts)]
        message = self._message
        return (
            tuple(i for i, ca in enumerate(message.certificate_authorities) if _within(ca.valid_for, at)),
            tuple(i for i, ct in enumerate(message.ctlogs) if _within(ct.public_key.valid_for, certified)),
            tuple(
                i
                for i, log in enumerate(message.tlogs)
                if log.log_id.key_id == log_id and _within(log.public_key.valid_for, at)
            ),
        )

    def _build_verifier(self, valid: tuple[tuple[int, ...], ...]) -> Verifier:
        authorities, ctlogs, tlogs = valid
        for indexes, what in ((authorities, "certificate authority"), (ctlogs, "CT log"), (tlogs, "transparency log")):
            if not indexes:
                raise ValueError(f"the trusted root has no {what} that was valid at signing time and named here")
        message = self._message
        update = {
            "certificate_authorities": [message.certificate_authorities[i] for i in authorities],
            "ctlogs": [message.ctlogs[i] for i in ctlogs],
            "tlogs": [message.tlogs[i] for i in tlogs],
        }
        return Verifier(trusted_root=TrustedRoot(message.model_copy(update=update)))

    def _check_issuer(self, issuer: str) -> None:
        if (self._is_local or issuer.startswith(LOCAL_ISSUER_PREFIX)) and issuer not in self._local_issuers:
            raise refusal("identity_foreign", _WHAT, f"this domain may not vouch for issuer {issuer}")


def _fingerprint(certificate_der: bytes) -> str:
    key = x509.load_der_x509_certificate(certificate_der).public_key()
    return spki_sha256(key).hex()


@lru_cache(maxsize=8)
def root_verifier(root_json: str) -> RootVerifier:
    """The verifier for a root; an agent has a few roots and verifies often.

    Raises:
        PatchctlError: ``trust.root_invalid``.
    """
    return RootVerifier(root_json)
