from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from patchctl.admission.facts import (
    APPLIED_IDS_MAX,
    INTEGER_MAX,
    GateInput,
    InputInvalidError,
    decode_input,
    encode_input,
    input_schema,
)
from patchctl.admission.known_answers import load_known_answers


@pytest.fixture
def facts() -> GateInput:
    return load_known_answers()[0].facts


def document(facts: GateInput) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(encode_input(facts))
    return parsed


def test_shipped_schema_is_the_structs_own() -> None:
    assert (files("policies") / "schema" / "input.json").read_bytes() == input_schema() + b"\n"


def test_schema_has_no_optional_key_no_float_and_no_unbounded_integer() -> None:
    schema = json.loads(input_schema())
    for name, group in schema["$defs"].items():
        assert group["required"] == list(group["properties"]) or set(group["required"]) == set(group["properties"]), (
            name
        )
        assert group["additionalProperties"] is False
        for field in group["properties"].values():
            assert field.get("type") != "number"
            if field.get("type") == "integer":
                assert (field["minimum"], field["maximum"]) == (0, INTEGER_MAX)


def test_encoding_is_canonical_and_round_trips(facts: GateInput) -> None:
    raw = encode_input(facts)
    assert raw == json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode()
    assert decode_input(raw) == facts


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        ("now", "unix", 1.0),
        ("now", "unix", True),
        ("now", "unix", "1"),
        ("now", "unix", None),
        ("now", "unix", -1),
        ("now", "unix", INTEGER_MAX + 1),
        ("now", "clock", "SYNCED"),
        ("request", "action", "apply\n"),
        ("request", "actor", ""),
        ("request", "actor", "root\x00"),
        ("request", "actor", "root\n"),
        ("request", "actor", "\ud800"),
        ("request", "actor", "a" * 256),
        ("patch", "base_digest", "sha256:" + "A" * 64),
        ("patch", "base_digest", "sha256:" + "a" * 64 + "\n"),
        ("patch", "base_digest", "sha256:" + "a" * 63),
        ("signature", "identity", "x" * 2049),
        ("ledger", "applied_ids", ["a"] * (APPLIED_IDS_MAX + 1)),
        ("ledger", "applied_ids", [1]),
        ("ledger", "applied_ids", {"a": 1}),
        ("memory", "verdict", ""),
    ],
)
def test_refuses_what_is_not_of_the_schema(facts: GateInput, group: str, field: str, value: Any) -> None:
    facts_document = document(facts)
    facts_document[group][field] = value
    with pytest.raises(InputInvalidError):
        decode_input(json.dumps(facts_document).encode())


def test_refuses_missing_and_unknown_keys_at_every_level(facts: GateInput) -> None:
    for group in document(facts):
        for damaged in (document(facts), document(facts)):
            damaged[group].popitem()
            with pytest.raises(InputInvalidError):
                decode_input(json.dumps(damaged).encode())
        extra = document(facts)
        extra[group]["extra"] = 1
        with pytest.raises(InputInvalidError):
            decode_input(json.dumps(extra).encode())
        missing = document(facts)
        del missing[group]
        with pytest.raises(InputInvalidError):
            decode_input(json.dumps(missing).encode())


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000])
def test_refuses_what_is_no_object(raw: bytes) -> None:
    with pytest.raises(InputInvalidError):
        decode_input(raw)


def test_refuses_a_repeated_key(facts: GateInput) -> None:
    raw = encode_input(facts).replace(b'"memory":{', b'"memory":{"verdict":"commit"},"memory":{')
    with pytest.raises(InputInvalidError, match="twice"):
        decode_input(raw)


def test_encoding_checks_a_struct_built_by_hand(facts: GateInput) -> None:
    wrong: Any = "whenever"
    built = msgspec.structs.replace(facts, now=msgspec.structs.replace(facts.now, unix=wrong))
    with pytest.raises(InputInvalidError):
        encode_input(built)
    with pytest.raises(InputInvalidError):
        encode_input(msgspec.structs.replace(facts, memory=object()))
