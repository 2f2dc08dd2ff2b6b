"""Private keys of a local domain: made once, readable by their owner only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

# ECDSA P-256 is the one key type that Fulcio, CT logs and RFC 3161 clients all read; Rekor v2 signs with Ed25519.
P256_KEYS: Final = ("root", "intermediate", "ctlog", "tsa-root", "tsa")
LOG_KEY: Final = "log"


class Keys:
    """The six private keys of a domain."""

    __slots__ = ("log", "p256")

    def __init__(self, p256: Mapping[str, ec.EllipticCurvePrivateKey], log: ed25519.Ed25519PrivateKey) -> None:
        self.p256 = p256
        self.log = log

    @classmethod
    def generate(cls) -> Keys:
        """Fresh keys, in memory only."""
        p256 = {name: ec.generate_private_key(ec.SECP256R1()) for name in P256_KEYS}
        return cls(p256, ed25519.Ed25519PrivateKey.generate())

    def save(self, folder: Path) -> None:
        """Write ``<name>.key`` files (PKCS #8 PEM, mode 0600, fsynced) into ``folder``.

        Raises:
            OSError: a file exists already, or the write failed.
        """
        keys: dict[str, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey] = {**self.p256, LOG_KEY: self.log}
        for name, key in keys.items():
            pem = key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_private(folder / f"{name}.key", pem)

    @classmethod
    def load(cls, folder: Path) -> Keys:
        """Read what :meth:`save` wrote.

        Raises:
            OSError: a file is missing or unreadable.
            ValueError: a file does not hold a key of its kind.
        """
        return cls({name: _p256(folder / f"{name}.key") for name in P256_KEYS}, _ed25519(folder / f"{LOG_KEY}.key"))


def _load(path: Path) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name} does not hold a private key") from error


def _p256(path: Path) -> ec.EllipticCurvePrivateKey:
    key = _load(path)
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise ValueError(f"{path.name} is not an ECDSA P-256 key")


def _ed25519(path: Path) -> ed25519.Ed25519PrivateKey:
    key = _load(path)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    raise ValueError(f"{path.name} is not an Ed25519 key")


def write_private(path: Path, data: bytes) -> None:
    """Create ``path`` with mode 0600 and flush it to disk.

    Raises:
        OSError: it exists already, or the write failed.
    """
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def spki(key: PublicKeyTypes) -> bytes:
    """DER SubjectPublicKeyInfo."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def spki_sha256(key: PublicKeyTypes) -> bytes:
    """32 bytes: how RFC 6962 logs and this project's domains name a key."""
    return hashlib.sha256(spki(key)).digest()
