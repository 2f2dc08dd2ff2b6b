"""The three services sigstore's signer talks to, as objects: no socket, no port, no proxy.

They stand in for Fulcio, Rekor v2 and a timestamp authority behind ``SigningContext``'s public constructor;
the signing code itself is sigstore's, unmodified. Their shapes follow sigstore-python 4.5
(``_internal/fulcio``, ``_internal/rekor``, ``_internal/timestamp``), which publishes no protocol for them.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any, cast

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from rfc3161_client import TimeStampResponse, decode_timestamp_response
from sigstore.dsse import Envelope
from sigstore.models import TransparencyLogEntry, TrustedRoot
from sigstore.oidc import IdentityToken
from sigstore.sign import SigningContext
from sigstore_models.rekor.v1 import TransparencyLogEntry as TransparencyLogEntryMessage
from sigstore_models.trustroot.v1 import TrustedRoot as TrustedRootMessage

from patchctl.trust.certificates import der, make_leaf
from patchctl.trust.domain import Clock, LocalDomain
from patchctl.trust.identity_token import TokenIssuer
from patchctl.trust.rekor import entry_body, transparency_log_entry
from patchctl.trust.timestamp import timestamp_response


class IssuedCertificate:
    """What Fulcio answers: the signing certificate and its chain up to the root."""

    def __init__(self, cert: x509.Certificate, chain: list[x509.Certificate]) -> None:
        self.cert = cert
        self.chain = chain


class LocalAuthority:
    """Fulcio: a certificate for whom the token vouches, over the key that signed the request."""

    def __init__(self, domain: LocalDomain, tokens: TokenIssuer, clock: Clock = time.time) -> None:
        self._domain = domain
        self._tokens = tokens
        self._clock = clock

    @property
    def signing_cert(self) -> LocalAuthority:
        """The endpoint object, in sigstore's terms."""
        return self

    def post(self, request: x509.CertificateSigningRequest, token: IdentityToken) -> IssuedCertificate:
        """Issue a certificate.

        Raises:
            ValueError: no proof of possession, or not an EC key.
            jwt.PyJWTError: the token is not ours.
        """
        identity = self._tokens.redeem(str(token))
        public_key = request.public_key()
        if not request.is_signature_valid or not isinstance(public_key, ec.EllipticCurvePublicKey):
            raise ValueError("the request does not prove possession of an EC key")
        certs = self._domain.certificates
        now_ms = int(self._clock() * 1000)
        issuer = self._domain.issuer
        leaf = make_leaf(
            self._domain.keys, certs["intermediate"], public_key, identity=identity, issuer=issuer, now_ms=now_ms
        )
        return IssuedCertificate(leaf, [certs["intermediate"], certs["root"]])


class LocalTimestamps:
    """A timestamp authority."""

    url = "local"

    def __init__(self, domain: LocalDomain, clock: Clock = time.time) -> None:
        self._domain = domain
        self._clock = clock

    def request_timestamp(self, signature: bytes) -> TimeStampResponse:
        """Timestamp ``signature``."""
        key, certificate = self._domain.keys.p256["tsa"], self._domain.certificates["tsa"]
        return decode_timestamp_response(timestamp_response(key, certificate, signature, int(self._clock())))


class LocalLog:
    """Rekor v2."""

    def __init__(self, domain: LocalDomain) -> None:
        self._domain = domain

    def _build_dsse_request(self, envelope: Envelope, certificate: x509.Certificate) -> bytes:
        """The request is the entry itself: both ends are ours."""
        return entry_body(hashlib.sha256(envelope.pae()).digest(), envelope.signature, der(certificate))

    def create_entry(self, body: bytes) -> TransparencyLogEntry:
        """Append an entry; returns with its proof, durable."""
        inclusion = self._domain.log.append(body)
        message = transparency_log_entry(body, inclusion, self._domain.log_id)
        return TransparencyLogEntry(TransparencyLogEntryMessage.from_dict(message))


def signing_context(authority: LocalAuthority, log: LocalLog, timestamps: LocalTimestamps, root: str) -> SigningContext:
    """A sigstore signer over these three services; ``root`` is the domain's trusted root JSON."""
    return SigningContext(
        fulcio=cast("Any", authority),
        rekor=cast("Any", log),
        trusted_root=TrustedRoot(TrustedRootMessage.from_json(root)),
        tsa_clients=[cast("Any", timestamps)],
    )
