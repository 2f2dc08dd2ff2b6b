from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchctl.admission.decision import REQUIRED_CHECKS, AnswerMalformedError, Finding, read_answer
from patchctl.admission.embedded import EmbeddedEngine
from patchctl.admission.engine import EngineError, Evaluation
from patchctl.admission.facts import GateInput, InputInvalidError, decode_input, encode_input, input_schema
from patchctl.admission.gate import decide
from patchctl.admission.known_answers import load_known_answers
from patchctl.admission.policy import PolicySet, load_default

ANSWERS = {known.name: known for known in load_known_answers()}
STARTS = [
    json.loads(encode_input(ANSWERS[name].facts))
    for name in ("all evidence present", "promote after expiry", "roll back with nothing but the record")
]
POLICY = load_default().with_data(ANSWERS["all evidence present"].settings)
PATCH = ANSWERS["all evidence present"].facts.patch
SCHEMA = json.loads(input_schema())["$defs"]
FIELDS = [
    (group, field)
    for group in GateInput.__struct_fields__
    for field in SCHEMA[group.title().replace("_", "")]["properties"]
]
DIGESTS = [PATCH.manifest_digest, PATCH.base_digest, PATCH.target_digest, "sha256:" + "e" * 64]
NAMES = [
    "fix-9",
    "stable",
    "canary",
    "lab",
    "patchctl-torch",
    "alice",
    "é",
    "e\u0301",
    'a"b',
    "a\\b",
    "%s%d",
    "{}",
    "\U0001f600",
]
TEXTS = [
    "",
    "public",
    "local",
    "https://issuer.example",
    "https://ci.example/release@main",
    "dev@local.example",
    *NAMES,
]
INTEGERS = [0, 1, 8, 9, 10, 1799990000, 1800000000, 1800000001, 1800000300, 1800000301, 1800090000, 2**53 - 1]


def value_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Valid values of one field, drawn from few so that they collide."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema["type"] == "integer":
        return st.sampled_from(INTEGERS)
    if schema["type"] == "array":
        return st.lists(value_of(schema["items"]), max_size=3)
    if schema.get("minLength") == 71:
        return st.sampled_from(DIGESTS)
    return st.sampled_from(NAMES if schema.get("minLength") else TEXTS)


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    """A valid input: an allowed one with a few facts replaced."""
    facts: dict[str, Any] = json.loads(json.dumps(draw(st.sampled_from(STARTS))))
    for group, field in draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        facts[group][field] = draw(value_of(SCHEMA[group.title().replace("_", "")]["properties"][field]))
    return facts


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine()
    yield made
    made.close()


def may_be_allowed(facts: GateInput) -> bool:
    """The rules again, in Python, for the settings of these tests."""
    now, patch, signature, action = facts.now, facts.patch, facts.signature, facts.request.action
    landing = patch.target_digest if action == "rollback" else patch.base_digest
    if facts.rollback.target != "recorded" or landing not in facts.rollback.known:
        return False
    if facts.integrity.files != "match" or patch.engine_kind != facts.target.engine_kind:
        return False
    if action == "rollback":
        return (
            signature.status != "failed"
            and signature.subject != "mismatch"
            and facts.signing_time.status != "invalid"
            and facts.transparency.status != "invalid"
            and facts.provenance.status != "invalid"
            and facts.qualification.status != "failed"
        )
    lab, staging = (facts.request.environment == name for name in ("lab", "staging"))
    signers = {
        ("public", "https://issuer.example", "https://ci.example/release@main"): {"stable"},
        ("local", "https://local.example", "dev@local.example"): {"stable", "lab"},
    }
    evidence = (
        signature.status == "verified"
        and signature.subject == "match"
        and patch.channel in signers.get((signature.domain, signature.issuer, signature.identity), set())
        and (signature.domain == "public" or lab or staging)
        and signature.signed_at_unix <= now.unix + 300
        and facts.signing_time.status == "verified"
        and facts.transparency.status == "included"
        and (now.clock == "synced" or (lab and now.clock == "unsynced"))
        and patch.created_unix <= now.unix + 300
        and facts.integrity.atomicity == "atomic"
        and patch.declaration == "complete"
        and facts.provenance.status in ({"verified", "missing"} if lab else {"verified"})
        and facts.qualification.status in ({"passed", "missing", "stale"} if lab or staging else {"passed"})
        and facts.rollback.snapshot == "present"
        and facts.target.health == "healthy"
    )
    if action == "promote":
        return (
            evidence
            and patch.sequence >= facts.ledger.highest_sequence
            and facts.target.running_digest == patch.target_digest
            and facts.memory.verdict == "commit"
        )
    return (
        evidence
        and patch.sequence > facts.ledger.highest_sequence
        and patch.patch_id not in facts.ledger.applied_ids
        and patch.created_unix < patch.expires_unix
        and now.unix < patch.expires_unix
        and facts.target.running_digest == patch.base_digest
        and facts.target.memory == "sufficient"
        and facts.memory.verdict == "not_run"
    )


@given(document=inputs())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_valid_inputs_never_fail_and_are_allowed_exactly_by_the_rules(
    engine: EmbeddedEngine, document: dict[str, Any]
) -> None:
    facts = decode_input(json.dumps(document).encode())
    decision = decide(facts, POLICY, engine)
    assert not [finding for finding in decision.denied if finding.id.startswith("gate.")]
    assert (decision.outcome == "allow") == may_be_allowed(facts)
    said = {finding.id for finding in decision.passed + decision.held + decision.denied}
    assert said == REQUIRED_CHECKS
    if decision.outcome == "allow":
        assert {finding.id for finding in decision.passed} == REQUIRED_CHECKS


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(TEXTS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*SCHEMA, *(field for _, field in FIELDS)]) | st.text(max_size=5), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(document=json_values)
@settings(max_examples=200, deadline=None)
def test_garbage_is_no_input_and_the_policy_alone_never_allows_it(engine: EmbeddedEngine, document: Any) -> None:
    raw = json.dumps(document).encode()
    with pytest.raises(InputInvalidError):
        decode_input(raw)
    try:
        answer = read_answer(engine.evaluate(POLICY, raw).value)
    except (AnswerMalformedError, EngineError):
        return
    assert answer.outcome == "deny"


# Facts that no check of an allowed apply reads.
UNREAD = {
    ("request", "actor"),
    ("patch", "manifest_digest"),
    ("patch", "author"),
    ("target", "name"),
    ("patch", "target_digest"),
}


@given(where=st.sampled_from([field for field in FIELDS if field not in UNREAD]), value=json_values)
@settings(max_examples=200, deadline=None)
def test_one_hostile_value_never_turns_the_policy_alone(
    engine: EmbeddedEngine, where: tuple[str, str], value: Any
) -> None:
    document = json.loads(json.dumps(STARTS[0]))
    group, field = where
    document[group][field] = value
    raw = json.dumps(document).encode()
    try:
        decode_input(raw)
    except InputInvalidError:
        pass
    else:
        return
    if isinstance(value, int | float) and not isinstance(value, bool):
        return  # a number of another kind may still be a true statement
    try:
        outcome = read_answer(engine.evaluate(POLICY, raw).value).outcome
    except (AnswerMalformedError, EngineError):
        return
    assert outcome == "deny"


class _Answers:
    """An engine that gives one prepared answer or raises one prepared error."""

    name = "prepared"

    def __init__(self, value: Any) -> None:
        self._value = value

    def evaluate(self, policy: PolicySet, document: bytes, query: str = "") -> Evaluation:
        if isinstance(self._value, BaseException):
            raise self._value
        return Evaluation(self._value, "1")

    def close(self) -> None:
        pass


@given(value=json_values)
def test_no_invented_answer_is_an_allow(value: Any) -> None:
    assert decide(ANSWERS["all evidence present"].facts, POLICY, _Answers(value)).outcome == "deny"


@pytest.mark.parametrize(
    "error", [ValueError("x"), RecursionError(), MemoryError(), OSError(5, "io"), AssertionError()]
)
def test_any_exception_denies(error: Exception) -> None:
    decision = decide(ANSWERS["all evidence present"].facts, POLICY, _Answers(error))
    assert decision.outcome == "deny"
    assert [finding.id for finding in decision.denied] == ["gate.engine_failed"]


def test_invalid_facts_and_a_broken_policy_deny_before_the_engine() -> None:
    allow = {
        "outcome": "allow",
        "denied": [],
        "held": [],
        "passed": [{"id": check, "message": ""} for check in REQUIRED_CHECKS],
    }
    facts = ANSWERS["all evidence present"].facts
    assert decide(facts, POLICY, _Answers(allow)).outcome == "allow"
    wrong: Any = None
    decision = decide(msgspec.structs.replace(facts, memory=wrong), POLICY, _Answers(allow))
    assert [finding.id for finding in decision.denied] == ["gate.input_invalid"]
    assert decide(facts, wrong, _Answers(allow)).outcome == "deny"
    assert decide(wrong, POLICY, _Answers(allow)).outcome == "deny"
    assert decide(facts, POLICY, wrong).denied == (
        Finding("gate.engine_failed", "AttributeError: 'NoneType' object has no attribute 'name'"),
    )
