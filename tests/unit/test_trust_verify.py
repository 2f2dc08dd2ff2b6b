from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rfc8785
from sigstore.dsse import Envelope
from sigstore.models import Bundle, TrustedRoot
from sigstore.verify import Verifier, policy

from patchctl.errors import ExitCode, PatchctlError
from patchctl.trust.certificates import make_authorities
from patchctl.trust.domain import LocalDomain
from patchctl.trust.keys import Keys
from patchctl.trust.sign import sign_statement
from patchctl.trust.statement import encode_hotfix
from patchctl.trust.testing import IDENTITY, SUBJECT_SHA256, example_hotfix, sign_unchecked
from patchctl.trust.verify import LINE_BYTES_MAX, require_identity, verify_attestation

Json = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trust")


@pytest.fixture(scope="module")
def made(folder: Path, statement: bytes) -> tuple[LocalDomain, bytes]:
    """A domain and its third signature: with entries before it, the proof has hashes."""
    domain = LocalDomain.create(folder / "domain", "local")
    return domain, [sign_statement(domain, IDENTITY, statement).encode() for _ in range(3)][-1]


@pytest.fixture(scope="module")
def domain(made: tuple[LocalDomain, bytes]) -> LocalDomain:
    return made[0]


@pytest.fixture(scope="module")
def line(made: tuple[LocalDomain, bytes]) -> bytes:
    return made[1]


@pytest.fixture(scope="module")
def other(folder: Path) -> LocalDomain:
    """Another domain that calls itself by the same name."""
    return LocalDomain.create(folder / "other", "local")


@pytest.fixture(scope="module")
def roots(domain: LocalDomain) -> dict[str, str]:
    return {"local": domain.trusted_root_json()}


@pytest.fixture(scope="module")
def statement() -> bytes:
    return encode_hotfix("fix.patch", SUBJECT_SHA256, example_hotfix())


def _refusal(roots: dict[str, str], line: bytes, subject: str = SUBJECT_SHA256) -> PatchctlError:
    with pytest.raises(PatchctlError) as caught:
        verify_attestation(roots, line, subject)
    assert caught.value.exit_code is ExitCode.SIGNATURE
    assert caught.value.what
    assert caught.value.why
    return caught.value


def _edited(line: bytes, edit: Callable[[Json], object]) -> bytes:
    bundle = json.loads(line)
    edit(bundle)
    return json.dumps(bundle).encode()


def _entry(bundle: Json) -> Json:
    entry: Json = bundle["verificationMaterial"]["tlogEntries"][0]
    return entry


@pytest.mark.parametrize("identity", ["a@example.com", "https://example.com/ci#main", "spiffe://example.com/release"])
def test_what_was_signed_verifies(domain: LocalDomain, roots: dict[str, str], statement: bytes, identity: str) -> None:
    before = int(time.time())
    line = sign_statement(domain, identity, statement)
    assert "\n" not in line
    verified = verify_attestation(roots, line.encode(), SUBJECT_SHA256)
    assert (verified.domain, verified.issuer, verified.identity) == ("local", domain.issuer, identity)
    assert before <= verified.signed_at_unix <= time.time()
    assert (verified.log_status, verified.timestamp_status) == ("included", "timestamp_authority")
    assert verified.log_index == domain.log.size() - 1
    assert (verified.subject_name, verified.subject_sha256) == ("fix.patch", SUBJECT_SHA256)
    assert json.loads(msgspec.json.encode(verified.predicate)) == json.loads(statement)["predicate"]
    assert len(verified.bundle_sha256) == 64


def _plain_sigstore(root: str, line: bytes, tmp_path: Path) -> Callable[[], tuple[str, bytes]]:
    path = tmp_path / "trusted_root.json"
    path.write_text(root)
    verifier = Verifier(trusted_root=TrustedRoot.from_file(str(path)))
    return lambda: verifier.verify_dsse(Bundle.from_json(line), policy.Identity(identity=IDENTITY))


def test_unmodified_sigstore_verifies_it_too(
    roots: dict[str, str], line: bytes, statement: bytes, tmp_path: Path
) -> None:
    assert _plain_sigstore(roots["local"], line, tmp_path)() == ("application/vnd.in-toto+json", statement)


def test_a_second_domain_of_the_same_name_is_another_domain(
    roots: dict[str, str], other: LocalDomain, line: bytes, statement: bytes
) -> None:
    theirs = sign_statement(other, IDENTITY, statement).encode()
    assert _refusal(roots, theirs).code == "trust.timestamp_invalid"
    assert _refusal({"local": other.trusted_root_json()}, line).code == "trust.timestamp_invalid"


def test_domains_are_tried_in_order_and_named(
    roots: dict[str, str], other: LocalDomain, line: bytes, statement: bytes
) -> None:
    both = {"first": other.trusted_root_json(), "second": roots["local"]}
    assert verify_attestation(both, line, SUBJECT_SHA256).domain == "second"
    theirs = sign_statement(other, IDENTITY, statement).encode()
    assert verify_attestation(both, theirs, SUBJECT_SHA256).domain == "first"


def test_domains_are_never_merged(domain: LocalDomain, other: LocalDomain, statement: bytes) -> None:
    """One domain's authority with the other's log and timestamps: valid only if the roots were merged."""
    keys = Keys({**other.keys.p256, "tsa": domain.keys.p256["tsa"]}, domain.keys.log)
    mixed = _with_keys(other, keys, tsa=domain.certificates["tsa"])
    mixed.log, mixed.log_id = domain.log, domain.log_id
    mixed.certificates["tsa-root"] = domain.certificates["tsa-root"]
    line = sign_unchecked(mixed, statement)
    assert verify_attestation({"mixed": mixed.trusted_root_json()}, line, SUBJECT_SHA256).domain == "mixed"
    both = {"one": domain.trusted_root_json(), "two": other.trusted_root_json()}
    assert _refusal(both, line).code == "trust.no_domain_accepts"


def test_no_domain_accepts_nothing(line: bytes) -> None:
    error = _refusal({}, line)
    assert (error.code, error.next_command) == ("trust.no_domain", "patchctl trust init")


def test_a_damaged_root_refuses_even_when_another_would_accept(roots: dict[str, str], line: bytes) -> None:
    assert _refusal({"broken": "{}", **roots}, line).code == "trust.root_invalid"
    assert _refusal({"huge": " " * (1 << 20) + roots["local"]}, line).code == "trust.root_invalid"
    twice = roots["local"].replace('"mediaType"', '"mediaType":"x","mediaType"', 1)
    assert _refusal({"twice": twice}, line).code == "trust.root_invalid"


def test_another_domain_cannot_speak_for_a_local_issuer(
    domain: LocalDomain, other: LocalDomain, statement: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for issuer in (domain.issuer, "https://token.actions.githubusercontent.com"):
        monkeypatch.setattr(other, "issuer", issuer)
        line = sign_unchecked(other, statement)
        assert _refusal({"other": other.trusted_root_json()}, line).code == "trust.identity_foreign"


def _with_keys(domain: LocalDomain, keys: Keys, **certificates: Any) -> LocalDomain:
    """The same domain in memory, with some of its material replaced."""
    forged = object.__new__(LocalDomain)
    forged.__dict__.update(domain.__dict__)
    forged.keys = keys
    forged.certificates = {**domain.certificates, **certificates}
    return forged


@pytest.mark.parametrize("name", ["ctlog", "tsa", "log", "root"])
def test_a_signature_by_a_foreign_key_is_refused(
    domain: LocalDomain, roots: dict[str, str], statement: bytes, name: str
) -> None:
    foreign = Keys.generate()
    p256 = dict(domain.keys.p256)
    certificates: Json = {}
    log_key = domain.keys.log
    if name == "log":
        log_key = foreign.log
    elif name == "root":
        p256 |= {"root": foreign.p256["root"], "intermediate": foreign.p256["intermediate"]}
        certificates = make_authorities(Keys(p256, log_key), "local", domain.created_unix)
        certificates = {key: certificates[key] for key in ("root", "intermediate")}
    else:
        p256[name] = foreign.p256[name]
    forged = _with_keys(domain, Keys(p256, log_key), **certificates)
    if name == "log":
        forged.log = type(domain.log)(domain.log._folder, domain.log._origin, domain.log_id, foreign.log.sign)
    code = "trust.timestamp_invalid" if name == "tsa" else "trust.signature_invalid"
    assert _refusal(roots, sign_unchecked(forged, statement)).code == code
    assert verify_attestation(roots, sign_unchecked(domain, statement), SUBJECT_SHA256).identity == IDENTITY


@pytest.mark.parametrize("offset_s", [-60, 601, 86_400])
def test_a_certificate_that_was_not_valid_when_signing_is_refused(
    domain: LocalDomain, roots: dict[str, str], statement: bytes, offset_s: int
) -> None:
    def root_since(start: str) -> dict[str, str]:
        root = json.loads(roots["local"])
        for authority in root["timestampAuthorities"] + root["certificateAuthorities"]:
            authority["validFor"] = {"start": start}
        return {"local": json.dumps(root)}

    line = sign_unchecked(domain, statement, timestamp_clock=lambda: time.time() + offset_s)
    code = "trust.signature_invalid" if offset_s > 0 else "trust.timestamp_invalid"
    assert _refusal(root_since("2020-01-01T00:00:00Z"), line).code == code


@pytest.mark.parametrize("part", ["certificateAuthorities", "ctlogs", "tlogs", "timestampAuthorities"])
def test_a_key_that_had_ended_is_refused(roots: dict[str, str], line: bytes, part: str, tmp_path: Path) -> None:
    signed_at = verify_attestation(roots, line, SUBJECT_SHA256).signed_at_unix

    def ending(at_unix: int) -> str:
        root = json.loads(roots["local"])
        for item in root[part]:
            period = item["publicKey"]["validFor"] if "publicKey" in item else item["validFor"]
            period["start"] = "2020-01-01T00:00:00Z"
            period["end"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_unix))
        return json.dumps(root)

    assert verify_attestation({"local": ending(signed_at + 2)}, line, SUBJECT_SHA256).signed_at_unix == signed_at
    code = "trust.timestamp_invalid" if part == "timestampAuthorities" else "trust.signature_invalid"
    assert _refusal({"local": ending(signed_at - 1)}, line).code == code
    if part != "timestampAuthorities":
        # Why the check is ours: sigstore by itself accepts the ended key.
        assert _plain_sigstore(ending(signed_at - 1), line, tmp_path)()


def test_a_position_that_the_log_did_not_sign_is_refused(roots: dict[str, str], line: bytes, tmp_path: Path) -> None:
    """The last entry's proof does not depend on its index, so the index can be moved; sigstore accepts that."""

    def elsewhere(bundle: Json) -> None:
        entry = _entry(bundle)
        proof = entry["inclusionProof"]
        assert (proof["logIndex"], proof["treeSize"], len(proof["hashes"])) == ("2", "3", 1)
        entry["logIndex"] = proof["logIndex"] = "1"
        proof["treeSize"] = "2"

    moved = _edited(line, elsewhere)
    assert _plain_sigstore(roots["local"], moved, tmp_path)()
    assert _refusal(roots, moved).code == "trust.log_position"
    renumbered = _edited(line, lambda bundle: _entry(bundle).update(logIndex="7"))
    assert _plain_sigstore(roots["local"], renumbered, tmp_path)()
    assert _refusal(roots, renumbered).code == "trust.log_position"


def _checkpoint(replace: Callable[[str], str]) -> Callable[[Json], object]:
    def edit(bundle: Json) -> None:
        checkpoint = _entry(bundle)["inclusionProof"]["checkpoint"]
        changed = replace(checkpoint["envelope"])
        assert changed != checkpoint["envelope"]
        checkpoint["envelope"] = changed

    return edit


def _flip_base64(text: str, byte: int = -1) -> str:
    raw = bytearray(base64.b64decode(text))
    raw[byte] ^= 1
    return base64.b64encode(raw).decode()


def _signature_line(note: str, edit: Callable[[str, str], str]) -> str:
    text, _, block = note.partition("\n\n")
    _, name, signature = block.split()
    return f"{text}\n\n{edit(name, signature)}\n"


TAMPERED: dict[str, tuple[Callable[[Json], object], str]] = {
    "checkpoint: size": (_checkpoint(lambda note: note.replace("\n3\n", "\n4\n")), "signature_invalid"),
    "checkpoint: origin": (_checkpoint(lambda note: "x" + note), "signature_invalid"),
    "checkpoint: signature": (
        _checkpoint(lambda note: _signature_line(note, lambda n, s: f"\u2014 {n} {_flip_base64(s)}")),
        "signature_invalid",
    ),
    "checkpoint: signer's name": (
        _checkpoint(lambda note: _signature_line(note, lambda n, s: f"\u2014 {n}x {s}")),
        "log_position",
    ),
    "checkpoint: signed twice": (
        _checkpoint(lambda note: _signature_line(note, lambda n, s: f"\u2014 {n} {s}\n\u2014 {n} {s}")),
        "log_position",
    ),
    "checkpoint: unread line": (
        _checkpoint(lambda note: _signature_line(note, lambda n, s: f"junk\n\u2014 {n} {s}")),
        "log_position",
    ),
    "proof: hash": (
        lambda b: _entry(b)["inclusionProof"].update(hashes=[_flip_base64(_entry(b)["inclusionProof"]["hashes"][0])]),
        "signature_invalid",
    ),
    "proof: no hash": (lambda b: _entry(b)["inclusionProof"].update(hashes=[]), "signature_invalid"),
    "proof: absent": (lambda b: _entry(b).pop("inclusionProof"), "bundle_malformed"),
    "log: another id": (
        lambda b: _entry(b)["logId"].update(keyId=_flip_base64(_entry(b)["logId"]["keyId"])),
        "signature_invalid",
    ),
    "log: unsigned time": (lambda b: _entry(b).update(integratedTime="1800000000"), "timestamp_invalid"),
    "log: kind": (lambda b: _entry(b)["kindVersion"].update(kind="dsse"), "signature_invalid"),
    "log: body": (
        lambda b: _entry(b).update(canonicalizedBody=_flip_base64(_entry(b)["canonicalizedBody"], 5)),
        "signature_invalid",
    ),
    "timestamp: signature": (
        lambda b: (t := b["verificationMaterial"]["timestampVerificationData"]["rfc3161Timestamps"][0]).update(
            signedTimestamp=_flip_base64(t["signedTimestamp"])
        ),
        "timestamp_invalid",
    ),
    "timestamp: absent": (
        lambda b: b["verificationMaterial"].pop("timestampVerificationData"),
        "bundle_malformed",
    ),
    "timestamp: one good, one bad": (
        lambda b: (t := b["verificationMaterial"]["timestampVerificationData"]["rfc3161Timestamps"]).append(
            {"signedTimestamp": _flip_base64(t[0]["signedTimestamp"])}
        ),
        "timestamp_invalid",
    ),
    "signature": (
        lambda b: b["dsseEnvelope"]["signatures"][0].update(
            sig=_flip_base64(b["dsseEnvelope"]["signatures"][0]["sig"])
        ),
        "timestamp_invalid",
    ),
    "signature: hint": (lambda b: b["dsseEnvelope"]["signatures"][0].update(keyid="x"), "bundle_malformed"),
    "signature: two": (
        lambda b: b["dsseEnvelope"]["signatures"].append(b["dsseEnvelope"]["signatures"][0]),
        "bundle_malformed",
    ),
    "payload": (
        lambda b: b["dsseEnvelope"].update(payload=_flip_base64(b["dsseEnvelope"]["payload"], 40)),
        "signature_invalid",
    ),
    "payload type": (lambda b: b["dsseEnvelope"].update(payloadType="text/plain"), "signature_invalid"),
    "media type: older": (
        lambda b: b.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.3"),
        "bundle_malformed",
    ),
    "unknown field": (lambda b: b.update(extra=1), "bundle_malformed"),
    "snake case": (lambda b: b.update(media_type=b.pop("mediaType")), "bundle_malformed"),
    "base64 with a foreign character": (
        lambda b: b["dsseEnvelope"].update(payload="!" + b["dsseEnvelope"]["payload"]),
        "bundle_malformed",
    ),
    "padded integer": (lambda b: _entry(b).update(logIndex="02"), "bundle_malformed"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_bundle_is_refused(roots: dict[str, str], line: bytes, name: str) -> None:
    edit, code = TAMPERED[name]
    assert _refusal(roots, _edited(line, edit)).code == f"trust.{code}"


def test_rewriting_the_json_alone_changes_nothing(roots: dict[str, str], line: bytes) -> None:
    assert verify_attestation(roots, _edited(line, lambda _: None), SUBJECT_SHA256).identity == IDENTITY


def test_duplicate_keys_in_the_bundle_are_refused(roots: dict[str, str], line: bytes) -> None:
    twice = line.replace(b'"payloadType"', b'"payloadType":"text/plain","payloadType"', 1)
    error = _refusal(roots, twice)
    assert error.code == "trust.bundle_malformed"
    assert "duplicate" in error.why


@pytest.mark.parametrize("raw", [b"", b"\n", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 50_000])
def test_what_is_no_bundle_is_refused(roots: dict[str, str], raw: bytes) -> None:
    assert _refusal(roots, raw).code == "trust.bundle_malformed"


def test_an_oversize_line_is_refused_unread(roots: dict[str, str]) -> None:
    assert _refusal(roots, b"[" * (LINE_BYTES_MAX + 1)).code == "trust.too_large"


def test_another_subject_is_refused(roots: dict[str, str], line: bytes) -> None:
    assert _refusal(roots, line, "6" * 64).code == "trust.subject_mismatch"


@pytest.mark.parametrize("subject", ["", "5" * 63, "5" * 64 + "\n", "sha256:" + "5" * 64, "A" * 64])
def test_a_malformed_expectation_is_refused(roots: dict[str, str], line: bytes, subject: str) -> None:
    assert _refusal(roots, line, subject).code == "trust.subject_malformed"


def test_a_foreign_payload_type_is_refused(
    domain: LocalDomain, roots: dict[str, str], statement: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Envelope, "_TYPE", "application/json")
    signed = sign_unchecked(domain, statement)
    monkeypatch.undo()
    assert _refusal(roots, signed).code == "trust.payload_type"


def test_a_signed_statement_is_still_checked(domain: LocalDomain, roots: dict[str, str], statement: bytes) -> None:
    fields = json.loads(statement)
    role = rfc8785.dumps({**fields, "predicateType": "https://slsa.dev/provenance/v1"})
    subjects = rfc8785.dumps({**fields, "subject": fields["subject"] * 2})
    twice = statement.replace(b'"sequence":1', b'"sequence":9,"sequence":1')
    for signed, code in (
        (role, "trust.predicate_type"),
        (subjects, "trust.statement_invalid"),
        (twice, "trust.statement_invalid"),
        (statement + b" ", "trust.statement_invalid"),
    ):
        assert _refusal(roots, sign_unchecked(domain, signed)).code == code


def test_an_exception_of_any_library_is_a_refusal(
    roots: dict[str, str], line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """What a panicking Rust extension raises."""

    for raised in (Panic("x"), MemoryError(), RecursionError(), UnicodeError("x"), KeyError("x")):

        def explode(*_: object, error: BaseException = raised) -> None:
            raise error

        monkeypatch.setattr(Verifier, "verify_dsse", explode)
        assert _refusal(roots, line).code == "trust.signature_invalid"
    monkeypatch.setattr(Verifier, "verify_dsse", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        verify_attestation(roots, line, SUBJECT_SHA256)


def test_a_sigstore_that_skips_its_policy_is_noticed(
    roots: dict[str, str], line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "verify_dsse", lambda *_: ("application/vnd.in-toto+json", b"{}"))
    assert "who signed" in _refusal(roots, line).why


def test_the_signer_is_compared_exactly(domain: LocalDomain, roots: dict[str, str], line: bytes) -> None:
    verified = verify_attestation(roots, line, SUBJECT_SHA256)
    right = {"domain": "local", "issuer": domain.issuer, "identity": IDENTITY}
    require_identity(verified, **right)
    for field, wrong in (("domain", "public"), ("issuer", domain.issuer + "/"), ("identity", IDENTITY.upper())):
        with pytest.raises(PatchctlError) as caught:
            require_identity(verified, **{**right, field: wrong})
        assert (caught.value.code, caught.value.exit_code) == ("trust.identity_mismatch", ExitCode.SIGNATURE)
        assert caught.value.why.startswith(field)
        assert wrong in caught.value.why


@pytest.mark.parametrize("identity", ["", "nobody", "a b@example.com", "@", "a@", "ü@example.com", "http:x", "a\n@b"])
def test_an_identity_is_an_address_or_a_uri(domain: LocalDomain, statement: bytes, identity: str) -> None:
    before = domain.log.size()
    with pytest.raises(PatchctlError) as caught:
        sign_statement(domain, identity, statement)
    assert (caught.value.code, caught.value.exit_code) == ("trust.identity_invalid", ExitCode.USAGE)
    assert domain.log.size() == before


def test_nothing_invalid_is_signed(domain: LocalDomain, statement: bytes) -> None:
    before = domain.log.size()
    with pytest.raises(PatchctlError) as caught:
        sign_statement(domain, IDENTITY, statement + b" ")
    assert caught.value.code == "trust.statement_invalid"
    assert domain.log.size() == before
