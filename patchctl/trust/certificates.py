"""X.509 of a local domain: two small authorities, and signing certificates as Fulcio issues them.

A signing certificate lives ten minutes, names one identity (SAN) and the issuer that vouched for it, and
embeds one signed certificate timestamp (RFC 6962). Extensions:
https://github.com/sigstore/fulcio/blob/main/docs/oid-info.md and certificate-specification.md beside it.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from patchctl.trust.keys import Keys, spki_sha256

ISSUER_V1_OID: Final = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
ISSUER_V2_OID: Final = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8")
_SCT_LIST_OID: Final = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
# Fulcio's own lifetime: long enough to sign and log, too short for a stolen key to matter.
LEAF_LIFETIME: Final = timedelta(minutes=10)
# A local domain is replaced, not rotated, by then.
_AUTHORITY_LIFETIME: Final = timedelta(days=3650)
_SHA256: Final = hashes.SHA256()
_NO_USAGE: Final = dict.fromkeys(
    (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    ),
    False,
)
_AUTHORITY_USAGE: Final = x509.KeyUsage(**{**_NO_USAGE, "key_cert_sign": True, "crl_sign": True})
_SIGNER_USAGE: Final = x509.KeyUsage(**{**_NO_USAGE, "digital_signature": True})


def der(certificate: x509.Certificate) -> bytes:
    """DER bytes."""
    return certificate.public_bytes(serialization.Encoding.DER)


def _name(organization: str, common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _builder(
    public_key: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    since: datetime,
    lifetime: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(since + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def make_authorities(keys: Keys, organization: str, since_unix: int) -> dict[str, x509.Certificate]:
    """The four long-lived certificates, by key name: root, intermediate, tsa-root, tsa.

    Timestamps hang below a root of their own: the key that dates signatures cannot name signers.
    """
    since = datetime.fromtimestamp(since_unix, UTC)
    timestamping = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])
    code_signing = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])

    def authority(name: str, issuer: str, path_length: int) -> x509.CertificateBuilder:
        return (
            _builder(
                keys.p256[name].public_key(),
                _name(organization, name),
                _name(organization, issuer),
                keys.p256[issuer],
                since=since,
                lifetime=_AUTHORITY_LIFETIME,
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
            .add_extension(_AUTHORITY_USAGE, critical=True)
        )

    tsa = _builder(
        keys.p256["tsa"].public_key(),
        _name(organization, "tsa"),
        _name(organization, "tsa-root"),
        keys.p256["tsa-root"],
        since=since,
        lifetime=_AUTHORITY_LIFETIME,
    )
    return {
        "root": authority("root", "root", 1).sign(keys.p256["root"], _SHA256),
        "intermediate": authority("intermediate", "root", 0)
        .add_extension(code_signing, critical=False)
        .sign(keys.p256["root"], _SHA256),
        "tsa-root": authority("tsa-root", "tsa-root", 0).sign(keys.p256["tsa-root"], _SHA256),
        "tsa": tsa.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_SIGNER_USAGE, critical=True)
        .add_extension(timestamping, critical=True)
        .sign(keys.p256["tsa-root"], _SHA256),
    }


def subject_alternative_name(identity: str) -> x509.GeneralName:
    """The SAN of an e-mail address or a URI (``https://...``, ``spiffe://...``).

    Raises:
        ValueError: neither, or not printable ASCII.
    """
    if not identity.isascii() or not identity.isprintable() or " " in identity:
        raise ValueError("an identity is printable ASCII without spaces")
    parts = urlsplit(identity)
    if parts.scheme and parts.netloc:
        return x509.UniformResourceIdentifier(identity)
    local, at, host = identity.rpartition("@")
    if at and local and host and not parts.scheme:
        return x509.RFC822Name(identity)
    raise ValueError(f"{identity!r} is neither an e-mail address nor a URI")


def make_leaf(
    keys: Keys,
    intermediate: x509.Certificate,
    public_key: ec.EllipticCurvePublicKey,
    *,
    identity: str,
    issuer: str,
    now_ms: int,
) -> x509.Certificate:
    """A signing certificate, valid from ``now_ms`` (milliseconds since the epoch, rounded down to the second).

    Raises:
        ValueError: ``identity`` is neither an e-mail address nor a URI.
    """
    key = keys.p256["intermediate"]
    since = datetime.fromtimestamp(now_ms // 1000, UTC)
    builder = (
        _builder(public_key, x509.Name([]), intermediate.subject, key, since=since, lifetime=LEAF_LIFETIME)
        .add_extension(_SIGNER_USAGE, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
        .add_extension(x509.SubjectAlternativeName([subject_alternative_name(identity)]), critical=True)
        .add_extension(x509.UnrecognizedExtension(ISSUER_V1_OID, issuer.encode()), critical=False)
        .add_extension(x509.UnrecognizedExtension(ISSUER_V2_OID, asn1.encode_der(issuer)), critical=False)
    )
    # The timestamp covers the certificate without its own extension: sign once to get those bytes, then again.
    tbs = builder.sign(key, _SHA256).tbs_certificate_bytes
    sct = _certificate_timestamp(keys.p256["ctlog"], spki_sha256(key.public_key()), tbs, now_ms)
    extension = asn1.encode_der(struct.pack("!HH", len(sct) + 2, len(sct)) + sct)
    return builder.add_extension(x509.UnrecognizedExtension(_SCT_LIST_OID, extension), critical=False).sign(
        key, _SHA256
    )


def _certificate_timestamp(
    log_key: ec.EllipticCurvePrivateKey, issuer_key_hash: bytes, tbs: bytes, now_ms: int
) -> bytes:
    """RFC 6962 section 3.2: a v1 SCT over a precertificate, without extensions."""
    version, signature_type, precert_entry, no_extensions = 0, 0, 1, b"\x00\x00"
    signed = (
        struct.pack("!BBQH32s", version, signature_type, now_ms, precert_entry, issuer_key_hash)
        + len(tbs).to_bytes(3, "big")
        + tbs
        + no_extensions
    )
    signature = log_key.sign(signed, ec.ECDSA(_SHA256))
    sha256_ecdsa = b"\x04\x03"
    return (
        struct.pack("!B32sQ", version, spki_sha256(log_key.public_key()), now_ms)
        + no_extensions
        + sha256_ecdsa
        + struct.pack("!H", len(signature))
        + signature
    )
