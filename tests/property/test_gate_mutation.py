"""Takes the policy apart, rule by rule: whatever is missing, no vector may come out more permissive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from patchctl.admission.decision import REQUIRED_CHECKS
from patchctl.admission.engine import ENTRYPOINT, EngineError, Evaluation
from patchctl.admission.gate import decide
from patchctl.admission.known_answers import KnownAnswer, load_known_answers
from patchctl.admission.policy import Module, PolicySet, load_default
from patchctl.admission.worker import _Server

ANSWERS = load_known_answers()
SETTINGS = ANSWERS[0].settings
POLICY = load_default().with_data(SETTINGS)
ALLOWED = [
    next(known for known in ANSWERS if known.outcome == "allow" and known.facts.request.action == action)
    for action in ("apply", "promote", "rollback")
]
STRICTNESS = {"allow": 0, "hold": 1, "deny": 2}
# A rule starts in the first column and runs to the next line that does.
RULE = re.compile(r"^(?!package |import )[a-z][^\n]*\n(?:(?:[\t}\])][^\n]*|)\n)*", re.MULTILINE)


class _InProcess:
    """The worker's engine without the process around it: hundreds of policies, none of them hostile."""

    name = "in-process"

    def __init__(self) -> None:
        self._server = _Server(cpu_s=0)
        self._loaded = ""

    def evaluate(self, policy: PolicySet, document: bytes, query: str = ENTRYPOINT) -> Evaluation:
        if policy.revision != self._loaded:
            modules = [(module.name, module.source) for module in policy.modules]
            self._request({"op": "load", "modules": modules, "data": policy.data_json.decode()})
            self._loaded = policy.revision
        return Evaluation(self._request({"op": "eval", "input": document.decode(), "query": query})["value"], "")

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = self._server.answer(request)
        if "error" in reply:
            raise EngineError(reply["error"], reply["why"])
        return reply

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> Iterator[_InProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Server, "_allow_cpu", lambda server: None)  # it would limit the test process
        yield _InProcess()


def without(module: Module, start: int, end: int) -> PolicySet:
    cut = Module(module.name, module.source[:start] + module.source[end:])
    return replace(POLICY, modules=tuple(cut if kept is module else kept for kept in POLICY.modules))


def concerned(module: Module) -> list[KnownAnswer]:
    """Each action's allowed vector, and the refused ones of the module's own checks; every third for shared rules."""
    ids = set(re.findall(r'"([a-z]+(?:\.[a-z]+)?)"', module.source)) & REQUIRED_CHECKS
    shared = not module.name.startswith("checks/")
    refused = [known for known in ANSWERS if known.outcome != "allow" and known.settings == SETTINGS]
    return ALLOWED + [known for known in refused[:: 3 if shared else 1] if shared or ids & {*known.denied, *known.held}]


@pytest.mark.parametrize("module", POLICY.modules, ids=lambda module: module.name)
def test_no_rule_is_missed_in_silence(engine: _InProcess, module: Module) -> None:
    vectors = concerned(module)
    rules = list(RULE.finditer(module.source))
    assert len(rules) >= 8
    noticed = 0
    for rule in rules:
        mutant = without(module, *rule.span())
        outcomes = [(known, decide(known.facts, mutant, engine).outcome) for known in vectors]
        for known, outcome in outcomes:
            assert STRICTNESS[outcome] >= STRICTNESS[known.outcome], (rule.group(), known.name)
        noticed += any(outcome != known.outcome for known, outcome in outcomes)
    assert noticed >= len(rules) // 2


@pytest.mark.parametrize("module", POLICY.modules, ids=lambda module: module.name)
def test_no_module_may_be_missing(engine: _InProcess, module: Module) -> None:
    mutant = replace(POLICY, modules=tuple(kept for kept in POLICY.modules if kept is not module))
    for known in ANSWERS:
        assert decide(known.facts, mutant, engine).outcome == "deny"


@pytest.mark.parametrize("check", sorted(REQUIRED_CHECKS))
@pytest.mark.parametrize("action", ["apply", "promote", "rollback"])
def test_a_silent_check_denies(engine: _InProcess, check: str, action: str) -> None:
    modules = tuple(
        Module(
            module.name,
            RULE.sub(
                lambda rule: (
                    "" if rule.group().startswith("results contains") and f'"{check}"' in rule.group() else rule.group()
                ),
                module.source,
            ),
        )
        for module in POLICY.modules
    )
    assert modules != POLICY.modules
    known = next(known for known in ALLOWED if known.facts.request.action == action)
    decision = decide(known.facts, replace(POLICY, modules=modules), engine)
    assert decision.outcome == "deny"
    assert [finding.id for finding in decision.denied] == [check]


def test_dropping_a_check_from_the_required_ones_does_not_help(engine: _InProcess) -> None:
    known = next(known for known in ANSWERS if known.name == "log proof invalid")
    modules = tuple(
        Module(module.name, re.sub(r'^.*"transparency".*\n', "", module.source, flags=re.MULTILINE))
        for module in POLICY.modules
    )
    decision = decide(known.facts, replace(POLICY, modules=modules), engine)
    assert decision.outcome == "deny"
    assert decision.denied[0].id == "gate.result_malformed"
    assert "transparency" in decision.denied[0].message
