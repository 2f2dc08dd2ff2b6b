"""Identity tokens of a local domain: what an OIDC provider would hand to the signer.

Issuer and certificate authority live in one process, so the token never leaves it: its key is random and
dies with the object. What remains is the property that counts: the authority certifies only what it vouched for.
"""

from __future__ import annotations

import secrets
import time
from typing import Final

import jwt

# sigstore clients accept no other audience.
_AUDIENCE: Final = "sigstore"
_ALGORITHM: Final = "HS256"
# A token is used at once; a minute is generous.
_LIFETIME_S: Final = 60


class TokenIssuer:
    """Issues tokens and redeems its own."""

    __slots__ = ("_issuer", "_key")

    def __init__(self, issuer: str) -> None:
        self._issuer = issuer
        self._key = secrets.token_bytes(32)

    def issue(self, identity: str) -> str:
        """A signed token for ``identity``, valid from now for a minute."""
        now = int(time.time())
        claims = {"iss": self._issuer, "aud": _AUDIENCE, "sub": identity, "iat": now, "exp": now + _LIFETIME_S}
        return jwt.encode(claims, self._key, _ALGORITHM)

    def redeem(self, token: str) -> str:
        """The identity a token was issued for.

        Raises:
            jwt.PyJWTError: not ours, altered or expired.
        """
        claims = jwt.decode(
            token,
            self._key,
            [_ALGORITHM],
            audience=_AUDIENCE,
            issuer=self._issuer,
            options={"require": ["iss", "aud", "sub", "exp"]},
        )
        return str(claims["sub"])
