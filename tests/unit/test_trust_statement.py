from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import rfc8785

from patchctl.errors import ExitCode, PatchctlError
from patchctl.trust.statement import (
    HOTFIX_TYPE,
    STATEMENT_BYTES_MAX,
    Declared,
    HotfixPredicate,
    decode_statement,
    encode_hotfix,
)
from patchctl.trust.testing import SUBJECT_SHA256, example_hotfix


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(encode_hotfix("fix.patch", SUBJECT_SHA256, example_hotfix()))
    return fields


def _refused(raw: bytes, code: str = "trust.statement_invalid") -> PatchctlError:
    with pytest.raises(PatchctlError) as caught:
        decode_statement(raw)
    assert caught.value.code == code
    assert caught.value.exit_code is ExitCode.SIGNATURE
    return caught.value


def test_a_statement_reads_back() -> None:
    declared = Declared(files=("a.py", "b.py"), tensors=("model.norm",), growth_bytes_per_request_max=0)
    predicate = example_hotfix(declared=declared)
    raw = encode_hotfix("fix.patch", SUBJECT_SHA256, predicate)
    statement = decode_statement(raw)
    assert statement.predicate == predicate
    assert (statement.subject_name, statement.subject_sha256) == ("fix.patch", SUBJECT_SHA256)
    assert rfc8785.dumps(json.loads(raw)) == raw


def test_the_fields_are_the_published_ones() -> None:
    fields = _fields()
    assert fields["_type"] == "https://in-toto.io/Statement/v1"
    assert fields["predicateType"] == "https://patchctl.dev/hotfix/v1"
    assert set(fields["predicate"]) == {
        *("patch_id", "channel", "sequence", "created_unix", "expires_unix", "author"),
        *("base_digest", "target_digest", "engine_kind", "declared"),
    }
    assert set(fields["predicate"]["declared"]) == {"files", "tensors", "growth_bytes_per_request_max"}


@pytest.mark.parametrize("field", HotfixPredicate.__struct_fields__)
def test_a_missing_field_is_refused(field: str) -> None:
    fields = _fields()
    del fields["predicate"][field]
    assert field in _refused(rfc8785.dumps(fields)).why


@pytest.mark.parametrize("path", [(), ("predicate",), ("predicate", "declared"), ("subject", 0)])
def test_an_unknown_field_is_refused(path: tuple[str | int, ...]) -> None:
    fields = _fields()
    place: Any = fields
    for key in path:
        place = place[key]
    place["extra"] = 1
    assert "extra" in _refused(rfc8785.dumps(fields)).why


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence", 0),
        ("sequence", True),
        ("sequence", "1"),
        ("created_unix", -1),
        ("expires_unix", 0),
        ("patch_id", ""),
        ("patch_id", "a\n"),
        ("channel", "../x"),
        ("author", "a b"),
        ("author", "\u202eevil"),
        ("author", "x" * 255),
        ("base_digest", "a" * 64),
        ("base_digest", "sha256:" + "A" * 64),
        ("base_digest", "sha256:" + "a" * 64 + "\n"),
        ("base_digest", "sha256:" + "b" * 64),
        ("declared", {"files": ["/etc/passwd"], "tensors": [], "growth_bytes_per_request_max": None}),
        ("declared", {"files": ["a/../b"], "tensors": [], "growth_bytes_per_request_max": None}),
        ("declared", {"files": ["b", "a"], "tensors": [], "growth_bytes_per_request_max": None}),
        ("declared", {"files": ["a", "a"], "tensors": [], "growth_bytes_per_request_max": None}),
        ("declared", {"files": [], "tensors": [""], "growth_bytes_per_request_max": None}),
        ("declared", {"files": [], "tensors": [], "growth_bytes_per_request_max": -1}),
        ("declared", {"files": [], "tensors": []}),
    ],
)
def test_a_value_outside_its_limits_is_refused(field: str, value: object) -> None:
    fields = _fields()
    fields["predicate"][field] = value
    _refused(rfc8785.dumps(fields))


@pytest.mark.parametrize("digest", ["5" * 63, "5" * 65, "G" * 64, "5" * 63 + "A", "5" * 64 + "\n", ""])
def test_a_subject_digest_has_64_lower_case_hex_digits(digest: str) -> None:
    fields = _fields()
    fields["subject"][0]["digest"]["sha256"] = digest
    _refused(rfc8785.dumps(fields))


@pytest.mark.parametrize("count", [0, 2])
def test_there_is_one_subject(count: int) -> None:
    fields = _fields()
    fields["subject"] *= count
    assert "subjects" in _refused(rfc8785.dumps(fields)).why


def test_a_second_digest_algorithm_is_refused() -> None:
    fields = _fields()
    fields["subject"][0]["digest"]["sha512"] = "5" * 128
    _refused(rfc8785.dumps(fields))


@pytest.mark.parametrize("role", [HOTFIX_TYPE + "/", "https://slsa.dev/provenance/v1", ""])
def test_another_role_has_its_own_code(role: str) -> None:
    fields = _fields()
    fields["predicateType"] = role
    _refused(rfc8785.dumps(fields), "trust.predicate_type")


def test_duplicate_keys_are_refused() -> None:
    raw = rfc8785.dumps(_fields()).replace(b'"sequence":1', b'"sequence":9,"sequence":1')
    assert "duplicate key 'sequence'" in _refused(raw).why


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw + b"\n",
        lambda raw: b" " + raw,
        lambda raw: b"\xef\xbb\xbf" + raw,
        lambda raw: raw.decode().encode("utf-16"),
        lambda raw: raw.replace(b'"sequence":1', b'"sequence":1.0'),
        lambda raw: raw.replace(b'"sequence":1', b'"sequence":1e0'),
        lambda raw: raw.replace(b'"sequence":1', b'"sequence":9007199254740992'),
        lambda raw: raw.replace(b'"sequence":1', b'"sequence":NaN'),
        lambda raw: raw.replace(b"fix-0001", b"fix\\u002d0001"),
        lambda raw: raw.replace(b"fix-0001", b"\\ud800"),
        lambda raw: b"[" * 100_000,
        lambda raw: b"null",
        lambda raw: b"",
    ],
)
def test_bytes_that_are_not_canonical_json_are_refused(spoil: Any) -> None:
    _refused(spoil(rfc8785.dumps(_fields())))


def test_an_oversize_statement_is_refused_before_it_is_parsed() -> None:
    _refused(b"[" * (STATEMENT_BYTES_MAX + 1), "trust.statement_too_large")


def test_an_invalid_statement_is_not_encoded() -> None:
    with pytest.raises(PatchctlError) as caught:
        encode_hotfix("fix.patch", SUBJECT_SHA256, example_hotfix(sequence=0))
    assert caught.value.code == "trust.statement_invalid"


def test_the_reason_is_one_printable_line() -> None:
    fields = _fields()
    fields["predicateType"] = "\x1b[2J\nhostile" + "x" * 5000
    why = _refused(rfc8785.dumps(fields), "trust.predicate_type").why
    assert why.isprintable()
    assert len(why) < 400


def test_the_predicate_is_immutable() -> None:
    with pytest.raises(AttributeError):
        example_hotfix().sequence = 2  # type: ignore[misc]
    assert msgspec.structs.replace(example_hotfix(), sequence=2).sequence == 2
