from __future__ import annotations

from typing import Any

import pytest

from patchctl.admission.decision import (
    REQUIRED_CHECKS,
    AnswerMalformedError,
    Decision,
    Finding,
    read_answer,
    require_allow,
)
from patchctl.errors import ExitCode, PatchctlError


def answer(outcome: str, *, denied: tuple[str, ...] = (), held: tuple[str, ...] = ()) -> dict[str, Any]:
    def findings(ids: Any) -> list[dict[str, str]]:
        return [{"id": check, "message": "because"} for check in ids]

    return {
        "outcome": outcome,
        "denied": findings(denied),
        "held": findings(held),
        "passed": findings(REQUIRED_CHECKS - set(denied) - set(held)),
    }


def test_reads_consistent_answers_sorted() -> None:
    assert read_answer(answer("allow")).outcome == "allow"
    assert read_answer(answer("hold", held=("provenance", "clock"))).held[0].id == "clock"
    assert read_answer(answer("deny", denied=("clock",), held=("provenance",))).outcome == "deny"


@pytest.mark.parametrize(
    "value",
    [
        answer("allow", denied=("clock",)),
        answer("allow", held=("clock",)),
        answer("hold"),
        answer("hold", denied=("clock",), held=("provenance",)),
        answer("deny"),
        answer("deny", held=("clock",)),
        answer("ALLOW"),
        {**answer("allow"), "passed": []},
        {**answer("allow"), "lifted": []},
        {**answer("allow"), "passed": answer("allow")["passed"][1:]},
        {**answer("hold", held=("clock",)), "passed": answer("allow")["passed"][2:4]},
        {**answer("allow"), "passed": ["clock"]},
        {},
        [],
        None,
        True,
        "allow",
    ],
)
def test_refuses_an_answer_that_contradicts_itself(value: Any) -> None:
    with pytest.raises(AnswerMalformedError):
        read_answer(value)


def test_require_allow_maps_outcomes_to_exit_codes() -> None:
    require_allow(Decision(outcome="allow"))
    with pytest.raises(PatchctlError) as denied:
        require_allow(Decision(outcome="deny", denied=(Finding("clock", "set it"),)), serving="build A")
    assert (denied.value.code, denied.value.exit_code) == ("policy.denied", ExitCode.POLICY_DENIED)
    assert denied.value.why == "clock: set it"
    assert denied.value.serving == "build A"
    with pytest.raises(PatchctlError) as held:
        require_allow(Decision(outcome="hold", held=(Finding("clock", "look"),)))
    assert (held.value.code, held.value.exit_code) == ("policy.held", ExitCode.HELD)


def test_require_allow_names_the_gates_own_failure() -> None:
    with pytest.raises(PatchctlError) as failed:
        require_allow(Decision(outcome="deny", denied=(Finding("gate.engine_timeout", "no answer"),)))
    assert (failed.value.code, failed.value.exit_code) == ("gate.engine_timeout", ExitCode.POLICY_DENIED)


def test_require_allow_refuses_an_outcome_nobody_knows() -> None:
    odd: Any = "Allow"
    with pytest.raises(PatchctlError):
        require_allow(Decision(outcome=odd))
