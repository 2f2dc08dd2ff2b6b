"""A local trust domain: the whole of a Sigstore deployment in one private folder.

Made for one machine, a demo or a test: certificate authority, certificate transparency key, transparency
log and timestamp authority, with their keys beside them. Whoever can read the folder can sign as any
identity of the domain; a production policy names other domains.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from patchctl.atomic import fsync_dir
from patchctl.errors import ExitCode, PatchctlError
from patchctl.trust import certificates, log, root
from patchctl.trust.keys import LOG_KEY, P256_KEYS, Keys, spki, spki_sha256, write_private
from patchctl.trust.note import ed25519_key_id
from patchctl.trust.refusal import cause, fail_closed, refusal

_RECORD: Final = "domain.json"
_CERTIFICATES: Final = ("root", "intermediate", "tsa-root", "tsa")
_FILES: Final = (
    _RECORD,
    *log.FILES,
    *(f"{name}.key" for name in (*P256_KEYS, LOG_KEY)),
    *(f"{name}.crt" for name in _CERTIFICATES),
)
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\Z")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

Clock = Callable[[], float]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    created_unix: int
    schema_version: Literal[1] = 1


class LocalDomain:
    """An open domain. Make one with :meth:`create`, once, or :meth:`open`; nothing is created implicitly.

    Attributes:
        name: the operator's name for it.
        fingerprint: hex sha256 of the root certificate's SubjectPublicKeyInfo; what to compare by eye.
        issuer: the issuer of every identity in the domain; contains the fingerprint.
        keys, certificates, log, log_id: the material itself, for :mod:`patchctl.trust.services`.
    """

    def __init__(self, folder: Path, record: _Record, keys: Keys, certs: dict[str, x509.Certificate]) -> None:
        self.name = record.name
        self.created_unix = record.created_unix
        self.keys = keys
        self.certificates = certs
        self.fingerprint = spki_sha256(keys.p256["root"].public_key()).hex()
        self.issuer = root.local_issuer(self.fingerprint)
        origin = root.log_origin(self.fingerprint)
        self.log_id = ed25519_key_id(origin, keys.log.public_key().public_bytes_raw())
        self.log = log.Log(folder, origin, self.log_id, keys.log.sign)

    @classmethod
    def create(cls, folder: Path, name: str, *, clock: Clock = time.time) -> LocalDomain:
        """Make a domain in ``folder``, which must not exist yet.

        Everything is written aside and renamed into place: after a crash there is a whole domain or none
        (and perhaps an unused ``.<folder>.new-*`` beside it).

        Raises:
            PatchctlError: ``trust.domain_name``, ``trust.domain_exists`` or ``trust.domain_create``.
        """
        what = f"the trust domain {name!r} was not created"
        if not _NAME.match(name):
            why = "a domain name has 1 to 63 lower-case letters, digits and hyphens"
            raise refusal("domain_name", what, why, exit_code=ExitCode.USAGE)
        if os.path.lexists(folder):
            why = f"{folder} exists; a domain is never overwritten"
            raise refusal("domain_exists", what, why, exit_code=ExitCode.USAGE)
        with fail_closed("domain_create", what):
            folder.parent.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
            try:
                _write(aside, _Record(name=name, created_unix=int(clock())))
                # Fails when a domain appeared meanwhile: rename replaces no folder that has files.
                aside.rename(folder)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            fsync_dir(folder.parent)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> LocalDomain:
        """Open the domain in ``folder``.

        Raises:
            PatchctlError: ``trust.domain_absent``, ``trust.domain_permissions`` or ``trust.domain_damaged``.
        """
        what = f"the trust domain in {folder} was not opened"
        _check_permissions(folder, what)
        with fail_closed("domain_damaged", what, next_command="restore the folder from a backup"):
            record = msgspec.json.decode((folder / _RECORD).read_bytes(), type=_Record)
            keys = Keys.load(folder)
            certs = {
                name: x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes()) for name in _CERTIFICATES
            }
            _check_agreement(keys, certs)
            return cls(folder, record, keys, certs)

    def trusted_root_json(self) -> str:
        """The public half, to hand to verifiers: a Sigstore trusted root v0.1, the same bytes every time."""
        certs, der = self.certificates, certificates.der
        return root.trusted_root_json(
            root.RootParts(
                name=self.name,
                fingerprint=self.fingerprint,
                since_unix=self.created_unix,
                signing_chain=(der(certs["intermediate"]), der(certs["root"])),
                timestamp_chain=(der(certs["tsa"]), der(certs["tsa-root"])),
                ctlog_key=spki(self.keys.p256["ctlog"].public_key()),
                log_key=spki(self.keys.log.public_key()),
                log_id=self.log_id,
            )
        )

    def describe(self) -> dict[str, str | int]:
        """What an operator may want to see; nothing secret.

        Raises:
            PatchctlError: ``trust.log_damaged`` or ``trust.log_busy``.
        """
        with fail_closed("log_damaged", f"the log of trust domain {self.name!r} was not read"):
            entries = self.log.size()
        return {
            "name": self.name,
            "kind": "local",
            "fingerprint": self.fingerprint,
            "issuer": self.issuer,
            "created_unix": self.created_unix,
            "expires_unix": int(self.certificates["intermediate"].not_valid_after_utc.timestamp()),
            "log_entries": entries,
        }


def _write(folder: Path, record: _Record) -> None:
    keys = Keys.generate()
    keys.save(folder)
    certs = certificates.make_authorities(keys, record.name, record.created_unix)
    for name, certificate in certs.items():
        write_private(folder / f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))
    write_private(folder / _RECORD, msgspec.json.encode(record))
    LocalDomain(folder, record, keys, certs).log.create()
    fsync_dir(folder)


def _check_permissions(folder: Path, what: str) -> None:
    """The folder and its files belong to us, and to us alone."""
    try:
        _check_private(folder, what, stat.S_ISDIR)
    except (FileNotFoundError, NotADirectoryError):
        why, command = "there is no such folder", "patchctl trust init"
        raise refusal("domain_absent", what, why, next_command=command, exit_code=ExitCode.NOT_FOUND) from None
    for name in _FILES:
        try:
            _check_private(folder / name, what, stat.S_ISREG)
        except FileNotFoundError:
            raise refusal("domain_damaged", what, f"{name} is missing") from None


def _check_private(path: Path, what: str, is_kind: Callable[[int], bool]) -> None:
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise _permissions(what, cause(error), "") from error
    if not is_kind(info.st_mode):
        raise refusal("domain_damaged", what, f"{path} is a link or not of the expected kind")
    if info.st_uid != os.geteuid():
        raise _permissions(what, f"{path} belongs to user {info.st_uid}", "")
    if info.st_mode & _OTHERS:
        why = f"{path} has mode {stat.S_IMODE(info.st_mode):04o}; other users may read or change it"
        raise _permissions(what, why, f"chmod go= {path}")


def _permissions(what: str, why: str, command: str) -> PatchctlError:
    return refusal("domain_permissions", what, why, next_command=command)


def _check_agreement(keys: Keys, certs: dict[str, x509.Certificate]) -> None:
    """Every certificate is for its key and signed by its authority.

    Raises:
        ValueError, TypeError, cryptography.exceptions.InvalidSignature: it is not.
    """
    for name, certificate in certs.items():
        public_key = certificate.public_key()
        if not isinstance(public_key, ec.EllipticCurvePublicKey) or public_key != keys.p256[name].public_key():
            raise ValueError(f"{name}.crt and {name}.key do not belong together")
    for name, issuer in (("intermediate", "root"), ("root", "root"), ("tsa", "tsa-root"), ("tsa-root", "tsa-root")):
        certs[name].verify_directly_issued_by(certs[issuer])
