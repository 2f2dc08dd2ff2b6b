"""Seeded damage to a signed line: refused with an explained error, or read as exactly the same facts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from patchctl.errors import ExitCode, PatchctlError
from patchctl.trust.domain import LocalDomain
from patchctl.trust.sign import sign_statement
from patchctl.trust.statement import decode_statement, encode_hotfix
from patchctl.trust.testing import IDENTITY, SUBJECT_SHA256, example_hotfix
from patchctl.trust.verify import VerifiedStatement, verify_attestation

_Result = TypeVar("_Result")
_SEED = 20_240_611
# The fields of a statement whose values are the author's choice: some replacements are valid there.
_FREE = {"author", "channel", "created_unix", "engine_kind", "files", "name", "patch_id", "tensors"}
_FREE |= {"growth_bytes_per_request_max"}
_REPLACEMENTS: tuple[Any, ...] = (
    None,
    "",
    "AAAA",
    "0",
    "1",
    "-1",
    "18446744073709551616",
    0,
    -1,
    True,
    1.5,
    [],
    {},
    "\ud800",
)


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> LocalDomain:
    return LocalDomain.create(tmp_path_factory.mktemp("trust") / "domain", "local")


@pytest.fixture(scope="module")
def statement() -> bytes:
    return encode_hotfix("fix.patch", SUBJECT_SHA256, example_hotfix())


@pytest.fixture(scope="module")
def line(domain: LocalDomain, statement: bytes) -> bytes:
    return [sign_statement(domain, IDENTITY, statement) for _ in range(3)][-1].encode()


@pytest.fixture(scope="module")
def roots(domain: LocalDomain) -> dict[str, str]:
    return {"local": domain.trusted_root_json()}


def _rng() -> random.Random:
    return random.Random(_SEED)  # noqa: S311 - reproducible, not secret


def _damaged_bytes(raw: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """Flipped bits, and bytes replaced, inserted, removed, repeated or cut off."""
    for _ in range(count):
        at, length = rng.randrange(len(raw)), rng.randint(1, 40)
        flipped = bytes([raw[at] ^ (1 << rng.randrange(8))])
        yield rng.choice(
            (
                raw[:at] + flipped + raw[at + 1 :],
                raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
                raw[:at] + bytes([rng.randrange(256)]) + raw[at:],
                raw[:at] + raw[at + length :],
                raw[: at + length] + raw[at:],
                raw[:at],
            )
        )


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(child, (*path, key))


def _damaged_fields(document: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every field removed, replaced by every odd value, and every list doubled."""
    for path in _paths(document):
        for change in ("remove", "double", *_REPLACEMENTS):
            copy = json.loads(json.dumps(document))
            place = copy
            for key in path[:-1]:
                place = place[key]
            if change == "remove":
                del place[path[-1]]
            elif change == "double":
                if not isinstance(place[path[-1]], list):
                    continue
                place[path[-1]] *= 2
            else:
                place[path[-1]] = change
            if copy != document or json.dumps(copy) != json.dumps(document):
                yield path, copy


def _attempt(call: Callable[[], _Result]) -> tuple[_Result | None, PatchctlError | None]:
    try:
        return call(), None
    except PatchctlError as refusal:
        return None, refusal


def _verify(roots: dict[str, str], raw: bytes) -> VerifiedStatement | None:
    verified, error = _attempt(lambda: verify_attestation(roots, raw, SUBJECT_SHA256))
    if error is not None:
        assert error.code.startswith("trust.")
        assert error.code != "trust.internal"
        assert error.exit_code is ExitCode.SIGNATURE
        assert error.why.isprintable()
    return verified


def test_no_damaged_byte_changes_a_fact(roots: dict[str, str], line: bytes) -> None:
    genuine = _verify(roots, line)
    assert genuine is not None
    damaged = [raw for raw in _damaged_bytes(line, _rng(), 900) if raw != line]
    accepted = []
    for raw in damaged:
        verified = _verify(roots, raw)
        if verified is not None:
            assert verified.bundle_sha256 != genuine.bundle_sha256
            assert replace(verified, bundle_sha256=genuine.bundle_sha256) == genuine
            accepted.append(raw)
    assert len(damaged) > 850
    # What no signature covers: a few header bytes of the timestamp's CMS envelope, and space around the JSON.
    for raw in accepted:
        assert _without_timestamp(raw) == _without_timestamp(line)
    assert len(accepted) <= len(damaged) // 100


def _without_timestamp(raw: bytes) -> Any:
    bundle = json.loads(raw)
    for stamp in bundle["verificationMaterial"]["timestampVerificationData"]["rfc3161Timestamps"]:
        del stamp["signedTimestamp"]
    return bundle


def test_no_damaged_field_is_accepted(roots: dict[str, str], line: bytes) -> None:
    mutants = list(_damaged_fields(json.loads(line)))
    assert len(mutants) > 300
    accepted = [path for path, document in mutants if _verify(roots, json.dumps(document).encode()) is not None]
    assert accepted == []


def test_no_damaged_statement_is_parsed_as_another(statement: bytes) -> None:
    genuine = decode_statement(statement)
    for raw in _damaged_bytes(statement, _rng(), 3000):
        parsed, error = _attempt(lambda raw=raw: decode_statement(raw))  # type: ignore[misc]
        if parsed is None:
            assert error is not None
            assert error.code in {"trust.statement_invalid", "trust.predicate_type"}
            continue
        # Unsigned, a changed digit is another statement, and says so; equal facts need equal bytes.
        assert (parsed == genuine) == (raw == statement)
        assert encode_hotfix(parsed.subject_name, parsed.subject_sha256, parsed.predicate) == raw


def test_no_damaged_field_of_a_statement_escapes_the_schema(statement: bytes) -> None:
    for path, document in _damaged_fields(json.loads(statement)):
        raw = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
        parsed, error = _attempt(lambda raw=raw: decode_statement(raw))  # type: ignore[misc]
        assert parsed is None or _FREE.intersection(path), path
        assert error is None or error.exit_code is ExitCode.SIGNATURE
