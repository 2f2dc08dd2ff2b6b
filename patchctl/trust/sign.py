"""Sign a statement in a local domain; the result is checked as strictly as a verifier would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchctl.errors import ExitCode
from patchctl.trust.refusal import cause, fail_closed, refusal
from patchctl.trust.statement import decode_statement
from patchctl.trust.verify import require_identity, verify_attestation

if TYPE_CHECKING:
    from patchctl.trust.domain import LocalDomain


def sign_statement(domain: LocalDomain, identity: str, statement: bytes) -> str:
    """Sign ``statement`` (canonical bytes, see :mod:`patchctl.trust.statement`) as ``identity``.

    The log entry is written before the bundle exists: a crash in between leaves an entry without a bundle,
    harmless, and signing again makes another.

    Args:
        domain: the local domain that vouches for ``identity``.
        identity: an e-mail address or a URI.
        statement: what to sign.

    Returns:
        A Sigstore bundle v0.3 as one line of JSON, without the newline: one line of ``*.sigstore.jsonl``.

    Raises:
        PatchctlError: ``trust.identity_invalid``, ``trust.statement_*``, ``trust.log_busy``,
            ``trust.log_damaged`` or ``trust.sign_failed``, which a self-check that did not pass is too.
    """
    what = "nothing was signed"
    with fail_closed("sign_failed", what):
        from sigstore.dsse import Statement
        from sigstore.oidc import IdentityToken

        from patchctl.trust import services
        from patchctl.trust.certificates import subject_alternative_name
        from patchctl.trust.identity_token import TokenIssuer

        subject = decode_statement(statement).subject_sha256
        try:
            subject_alternative_name(identity)
        except ValueError as error:
            raise refusal("identity_invalid", what, cause(error), exit_code=ExitCode.USAGE) from error
        root = domain.trusted_root_json()
        tokens = TokenIssuer(domain.issuer)
        context = services.signing_context(
            services.LocalAuthority(domain, tokens),
            services.LocalLog(domain),
            services.LocalTimestamps(domain),
            root,
        )
        with context.signer(IdentityToken(tokens.issue(identity))) as signer:
            line = signer.sign_dsse(Statement(statement)).to_json()
        verified = verify_attestation({domain.name: root}, line.encode(), subject)
        require_identity(verified, domain=domain.name, issuer=domain.issuer, identity=identity)
        return line
