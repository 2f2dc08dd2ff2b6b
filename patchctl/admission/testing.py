"""Runs a policy's own tests, the ``test_*`` rules of its ``*_test.rego`` modules, as ``opa test`` does."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from patchctl.admission.engine import EngineError, PolicyEngine
from patchctl.admission.lint import package_of
from patchctl.admission.policy import PolicySet

_TEST_RULE = re.compile(r"^(test_[a-z0-9_]+)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RegoTestResult:
    """One Rego test: its full rule path, whether it was ``true``, and why not."""

    name: str
    passed: bool
    detail: str = ""


def run_rego_tests(policy: PolicySet, engine: PolicyEngine | None = None) -> tuple[RegoTestResult, ...]:
    """Run every ``test_*`` rule of ``policy.tests``; undefined, false and failing evaluations are failures.

    Args:
        policy: rules, data and tests.
        engine: where to run them; by default an embedded engine of our own.

    Raises:
        EngineError: never; an engine failure fails its test.
    """
    whole = replace(policy, modules=policy.modules + policy.tests, tests=())
    names = [
        ".".join(("data", *package_of(module.source), rule))
        for module in policy.tests
        for rule in dict.fromkeys(_TEST_RULE.findall(module.source))
    ]
    if engine is not None:
        return tuple(_run(whole, engine, name) for name in names)
    from patchctl.admission.embedded import EmbeddedEngine

    own = EmbeddedEngine()
    try:
        return tuple(_run(whole, own, name) for name in names)
    finally:
        own.close()


def _run(policy: PolicySet, engine: PolicyEngine, name: str) -> RegoTestResult:
    try:
        value = engine.evaluate(policy, b"{}", name).value
    except EngineError as error:
        return RegoTestResult(name, passed=False, detail=str(error))
    return RegoTestResult(name, passed=value is True, detail="" if value is True else f"value {value!r}")
