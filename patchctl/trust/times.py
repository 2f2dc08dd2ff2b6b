"""When a bundle was signed: every time in it that something trusted vouches for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from rfc3161_client import TimeStampResponse, VerifierBuilder
from rfc3161_client import VerificationError as TimestampError
from sigstore.models import Bundle, TrustedRoot

Source = Literal["timestamp_authority", "transparency_log"]
# One signing certificate and one root at least.
_CHAIN_MIN: Final = 2


@dataclass(frozen=True, slots=True)
class SigningTime:
    """A time, and who says so."""

    at: datetime
    source: Source


def authority_time(root: TrustedRoot, response: TimeStampResponse, signature: bytes) -> datetime:
    """The time at which an authority of ``root`` saw ``signature``.

    Raises:
        ValueError: no authority of the root, valid at that time, signed this response over ``signature``.
    """
    reasons = ["the trusted root has no timestamp authority"]
    for authority in root.get_timestamp_authorities():
        chain = authority.certificates(allow_expired=True)
        if len(chain) < _CHAIN_MIN:
            continue
        builder = VerifierBuilder().tsa_certificate(chain[0]).add_root_certificate(chain[-1])
        for certificate in chain[1:-1]:
            builder = builder.add_intermediate_certificate(certificate)
        try:
            builder.build().verify_message(response, signature)
        except TimestampError as error:
            reasons.append(str(error))
            continue
        at = response.tst_info.gen_time
        end = authority.validity_period_end
        if authority.validity_period_start <= at and (end is None or at <= end):
            return at
        reasons.append(f"the authority was not valid at {at}")
    raise ValueError(f"timestamp not trusted: {reasons[-1]}")


def signing_times(root: TrustedRoot, bundle: Bundle, integrated_unix: int | None) -> list[SigningTime]:
    """All signing times of ``bundle``; sigstore refuses, when parsing, a bundle that could have none.

    A timestamp that does not verify refuses the bundle, though another may: nothing unverified is carried
    along. ``integrated_unix`` is a Rekor v1 log's own time; sigstore checks the promise that signs it later.

    Raises:
        ValueError: one of them is not trusted.
    """
    material = bundle.verification_material.timestamp_verification_data
    responses = material.rfc3161_timestamps if material else []
    times = [
        SigningTime(authority_time(root, response, bundle.signature), "timestamp_authority") for response in responses
    ]
    if integrated_unix is not None:
        times.append(SigningTime(datetime.fromtimestamp(integrated_unix, UTC), "transparency_log"))
    return times
