"""One decision: validate the facts, ask the engine, judge its answer. Everything that fails is a deny."""

from __future__ import annotations

import time

from msgspec.structs import replace

from patchctl.admission.decision import AnswerMalformedError, Decision, Finding, read_answer, require_allow
from patchctl.admission.engine import EngineError, PolicyEngine
from patchctl.admission.facts import GateInput, InputInvalidError, encode_input
from patchctl.admission.policy import PolicySet, sha256_digest

__all__ = ["Decision", "Finding", "decide", "require_allow"]


def decide(facts: GateInput, policy: PolicySet, engine: PolicyEngine) -> Decision:
    """Decide on ``facts``; never raises on a failure of its parts, denies instead.

    Returns:
        A decision whose ``denied`` holds a ``gate.*`` finding when the gate itself failed:
        ``gate.input_invalid``, ``gate.result_malformed``, an :class:`EngineError` code, or
        ``gate.engine_failed`` for anything nobody foresaw.
    """
    started = time.perf_counter()
    decision = Decision(outcome="deny")
    try:
        decision = replace(decision, engine=engine.name)
        document = encode_input(facts)
        decision = replace(decision, input_digest=sha256_digest(document))
        decision = replace(decision, policy_digest=policy.policy_digest, data_digest=policy.data_digest)
        evaluation = engine.evaluate(policy, document)
        decision = replace(decision, engine_version=evaluation.engine_version)
        answer = read_answer(evaluation.value)
        decision = replace(
            decision,
            outcome=answer.outcome,
            denied=answer.denied,
            held=answer.held,
            passed=answer.passed,
        )
    except InputInvalidError as error:
        decision = _refused(decision, "gate.input_invalid", str(error))
    except AnswerMalformedError as error:
        decision = _refused(decision, "gate.result_malformed", str(error))
    except EngineError as error:
        decision = _refused(decision, error.code, error.why)
    except Exception as error:  # the boundary: whatever it was, nothing was allowed
        decision = _refused(decision, "gate.engine_failed", f"{type(error).__name__}: {error}")
    return replace(decision, took_ms=round((time.perf_counter() - started) * 1e3, 3))


def _refused(decision: Decision, code: str, why: str) -> Decision:
    return replace(decision, outcome="deny", denied=(Finding(code, why),), held=(), passed=())
