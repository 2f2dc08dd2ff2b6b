"""RFC 3161 timestamp responses, signed by the domain's own timestamping key.

The ASN.1 types are those of RFC 3161 (TimeStampResp, TSTInfo), RFC 5652 (SignedData) and RFC 5035
(SigningCertificateV2), reduced to the fields a response to a SHA-256 request has.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Annotated, Final

from cryptography import x509
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from patchctl.trust.certificates import der

_OID = x509.ObjectIdentifier
_SHA256_OID: Final = _OID("2.16.840.1.101.3.4.2.1")
_ECDSA_SHA256_OID: Final = _OID("1.2.840.10045.4.3.2")
_SIGNED_DATA_OID: Final = _OID("1.2.840.113549.1.7.2")
_TST_INFO_OID: Final = _OID("1.2.840.113549.1.9.16.1.4")
_CONTENT_TYPE_OID: Final = _OID("1.2.840.113549.1.9.3")
_MESSAGE_DIGEST_OID: Final = _OID("1.2.840.113549.1.9.4")
_SIGNING_CERTIFICATE_OID: Final = _OID("1.2.840.113549.1.9.16.2.47")
# The policy name that Sigstore's timestamp authority uses.
_POLICY_OID: Final = _OID("1.3.6.1.4.1.57264.2")


@asn1.sequence
class _Algorithm:
    algorithm: x509.ObjectIdentifier
    parameters: asn1.Null | None


@asn1.sequence
class _Imprint:
    algorithm: _Algorithm
    digest: bytes


@asn1.sequence
class _TstInfo:
    version: int
    policy: x509.ObjectIdentifier
    imprint: _Imprint
    serial: int
    time: asn1.GeneralizedTime


@asn1.sequence
class _Attribute:
    type: x509.ObjectIdentifier
    values: asn1.SetOf[asn1.TLV]


@asn1.sequence
class _CertificateId:
    sha256: bytes


@asn1.sequence
class _SigningCertificate:
    certificates: list[_CertificateId]


@asn1.sequence
class _SignerId:
    issuer: asn1.TLV
    serial: int


@asn1.sequence
class _SignerInfo:
    version: int
    signer: _SignerId
    digest_algorithm: _Algorithm
    attributes: Annotated[asn1.SetOf[_Attribute], asn1.Implicit(0)]
    signature_algorithm: _Algorithm
    signature: bytes


@asn1.sequence
class _Content:
    type: x509.ObjectIdentifier
    content: Annotated[bytes, asn1.Explicit(0)]


@asn1.sequence
class _SignedData:
    version: int
    digest_algorithms: asn1.SetOf[_Algorithm]
    content: _Content
    signers: asn1.SetOf[_SignerInfo]


@asn1.sequence
class _Token:
    type: x509.ObjectIdentifier
    content: Annotated[_SignedData, asn1.Explicit(0)]


@asn1.sequence
class _Status:
    status: int


@asn1.sequence
class _Response:
    status: _Status
    token: _Token


def _tlv(value: bytes) -> asn1.TLV:
    return asn1.decode_der(asn1.TLV, value)


def timestamp_response(
    key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, message: bytes, now_unix: int
) -> bytes:
    """DER TimeStampResp (status granted) saying that ``message`` existed at ``now_unix``.

    The certificate is left out, as a requester that holds it asks for: verifiers take it from the trusted root.
    """
    sha256 = _Algorithm(algorithm=_SHA256_OID, parameters=asn1.Null())
    info = asn1.encode_der(
        _TstInfo(
            version=1,
            policy=_POLICY_OID,
            imprint=_Imprint(algorithm=sha256, digest=hashlib.sha256(message).digest()),
            serial=x509.random_serial_number(),
            time=asn1.GeneralizedTime(datetime.fromtimestamp(now_unix, UTC)),
        )
    )
    certificate_id = _SigningCertificate(
        certificates=[_CertificateId(sha256=hashlib.sha256(der(certificate)).digest())]
    )
    values = {
        _CONTENT_TYPE_OID: asn1.encode_der(_TST_INFO_OID),
        _MESSAGE_DIGEST_OID: asn1.encode_der(hashlib.sha256(info).digest()),
        _SIGNING_CERTIFICATE_OID: asn1.encode_der(certificate_id),
    }
    attributes = asn1.SetOf([_Attribute(type=oid, values=asn1.SetOf([_tlv(value)])) for oid, value in values.items()])
    signer = _SignerInfo(
        version=1,
        signer=_SignerId(issuer=_tlv(certificate.issuer.public_bytes()), serial=certificate.serial_number),
        digest_algorithm=sha256,
        attributes=attributes,
        signature_algorithm=_Algorithm(algorithm=_ECDSA_SHA256_OID, parameters=None),
        # Signed with the universal SET OF tag, not the implicit one it is sent with (RFC 5652, section 5.4).
        signature=key.sign(asn1.encode_der(attributes), ec.ECDSA(hashes.SHA256())),
    )
    signed = _SignedData(
        version=3,
        digest_algorithms=asn1.SetOf([sha256]),
        content=_Content(type=_TST_INFO_OID, content=info),
        signers=asn1.SetOf([signer]),
    )
    return asn1.encode_der(_Response(status=_Status(status=0), token=_Token(type=_SIGNED_DATA_OID, content=signed)))
