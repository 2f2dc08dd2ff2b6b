from __future__ import annotations

from collections.abc import Iterator

import pytest

from patchctl.admission.decision import REQUIRED_CHECKS
from patchctl.admission.embedded import EmbeddedEngine
from patchctl.admission.gate import decide
from patchctl.admission.known_answers import KnownAnswer, failing_known_answers, load_known_answers
from patchctl.admission.policy import load_default

ANSWERS = load_known_answers()


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine()
    yield made
    made.close()


@pytest.mark.parametrize("known", ANSWERS, ids=lambda known: known.name)
def test_embedded_engine_gives_the_known_answer(engine: EmbeddedEngine, known: KnownAnswer) -> None:
    decision = decide(known.facts, load_default().with_data(known.settings), engine)
    assert known.matches(decision), decision
    for finding in decision.reasons:
        assert len(finding.message) > 20


def test_vectors_are_many_named_once_and_reach_every_check() -> None:
    assert len({known.name for known in ANSWERS}) == len(ANSWERS) >= 80
    assert {check for known in ANSWERS for check in known.denied} == REQUIRED_CHECKS
    holding = {check for known in ANSWERS for check in known.held}
    assert holding == {
        "clock",
        "declaration",
        "memory.verdict",
        "provenance",
        "qualification",
        "rollback.snapshot",
        "signing.time",
        "target.health",
        "target.memory",
        "transparency",
    }


def test_a_changed_policy_fails_its_known_answers(engine: EmbeddedEngine) -> None:
    assert failing_known_answers(load_default(), engine) == ()
    lenient = load_default().with_data({"environments": {"production": {"levels": {"provenance_missing": "pass"}}}})
    assert "provenance missing in production" in failing_known_answers(lenient, engine)
