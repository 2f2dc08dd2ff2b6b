"""Building blocks for tests of this package and of its callers: valid claims, and signatures gone wrong."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from patchctl.trust.statement import Declared, HotfixPredicate

if TYPE_CHECKING:
    from patchctl.trust.domain import Clock, LocalDomain

SUBJECT_SHA256: Final = "5" * 64
IDENTITY: Final = "release@example.com"


def example_hotfix(**changes: Any) -> HotfixPredicate:
    """A valid predicate, created now and good for an hour; ``changes`` replaces fields."""
    now = int(time.time())
    hotfix = HotfixPredicate(
        patch_id="fix-0001",
        channel="production",
        sequence=1,
        created_unix=now,
        expires_unix=now + 3600,
        author="author@example.com",
        base_digest="sha256:" + "a" * 64,
        target_digest="sha256:" + "b" * 64,
        engine_kind="patchctl-torch",
        declared=Declared(files=("request_path.py",), tensors=(), growth_bytes_per_request_max=None),
    )
    return msgspec.structs.replace(hotfix, **changes)


def sign_unchecked(
    domain: LocalDomain,
    statement: bytes,
    *,
    identity: str = IDENTITY,
    certificate_clock: Clock = time.time,
    timestamp_clock: Clock = time.time,
) -> bytes:
    """A bundle line as ``sign_statement`` makes it, without any of its checks and with clocks of one's own."""
    from sigstore.dsse import Statement
    from sigstore.oidc import IdentityToken

    from patchctl.trust import services
    from patchctl.trust.identity_token import TokenIssuer

    tokens = TokenIssuer(domain.issuer)
    context = services.signing_context(
        services.LocalAuthority(domain, tokens, certificate_clock),
        services.LocalLog(domain),
        services.LocalTimestamps(domain, timestamp_clock),
        domain.trusted_root_json(),
    )
    with context.signer(IdentityToken(tokens.issue(identity))) as signer:
        return signer.sign_dsse(Statement(statement)).to_json().encode()
