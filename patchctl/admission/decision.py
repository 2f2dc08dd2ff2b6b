"""What the gate answers, and the reading of an engine's raw result. Pure: no IO, no clock.

An engine's answer is judged again here: the outcome must follow from the findings, and an allow must
carry a pass for every required check. A policy that lost a rule, or an engine that lost a result, so
ends in a deny and not in silence.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from patchctl.errors import ExitCode, PatchctlError

Outcome = Literal["allow", "deny", "hold"]

# Every policy must report on these; tested equal to `required` in policies/main.rego.
REQUIRED_CHECKS = frozenset(
    {
        "clock",
        "declaration",
        "integrity.atomicity",
        "integrity.files",
        "memory.verdict",
        "patch.id",
        "patch.sequence",
        "patch.validity",
        "provenance",
        "qualification",
        "rollback.snapshot",
        "rollback.target",
        "signature.domain",
        "signature.identity",
        "signature.subject",
        "signature.verified",
        "signing.time",
        "target.base",
        "target.engine",
        "target.health",
        "target.memory",
        "transparency",
    },
)


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """One check's say: its stable id, and what an operator should know or do."""

    id: str
    message: str


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy's result document, as ``data.patchctl.gate.decision`` must return it."""

    outcome: Outcome
    denied: tuple[Finding, ...]
    held: tuple[Finding, ...]
    passed: tuple[Finding, ...]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The gate's answer, with everything needed to replay it.

    Attributes:
        outcome: deny beats hold, hold beats allow.
        denied: findings that refuse, sorted by id; ids ``gate.*`` are the gate's own failures.
        held: findings a human must look at.
        passed: positive evidence.
        engine: which engine answered, e.g. ``embedded`` or ``server``.
        policy_digest: digest of the Rego modules, or "" when they could not be read.
        data_digest: digest of the policy's data, or "".
        input_digest: digest of the canonical input, or "" when it was invalid.
        took_ms: wall time of the decision.
    """

    outcome: Outcome
    denied: tuple[Finding, ...] = ()
    held: tuple[Finding, ...] = ()
    passed: tuple[Finding, ...] = ()
    engine: str = ""
    engine_version: str = ""
    policy_digest: str = ""
    data_digest: str = ""
    input_digest: str = ""
    took_ms: float = 0.0

    @property
    def reasons(self) -> tuple[Finding, ...]:
        """What stands in the way: the denials, else the holds, else nothing."""
        return self.denied or self.held


class AnswerMalformedError(ValueError):
    """The engine's result is not a decision, or contradicts itself."""


def _outcome(answer: Answer) -> Outcome:
    if answer.denied:
        return "deny"
    return "hold" if answer.held else "allow"


def read_answer(value: Any) -> Answer:
    """Check a raw engine result and return it with findings sorted by id.

    Raises:
        AnswerMalformedError: wrong shape, an outcome its findings do not support, or a silent required check.
    """
    try:
        answer = msgspec.convert(value, type=Answer, strict=True)
    except msgspec.ValidationError as error:
        raise AnswerMalformedError(f"the result is not a decision: {error}") from error
    if answer.outcome != _outcome(answer):
        raise AnswerMalformedError(f"outcome {answer.outcome!r} does not follow from the findings")
    said = {finding.id for finding in answer.passed + answer.held}
    if answer.outcome != "deny" and not said >= REQUIRED_CHECKS:
        silent = ", ".join(sorted(REQUIRED_CHECKS - said))
        raise AnswerMalformedError(f"outcome {answer.outcome!r} without a word from: {silent}")
    return Answer(
        outcome=answer.outcome,
        denied=tuple(sorted(answer.denied)),
        held=tuple(sorted(answer.held)),
        passed=tuple(sorted(answer.passed)),
    )


def require_allow(decision: Decision, *, serving: str = "", next_command: str = "") -> None:
    """Return when the outcome is ``allow``.

    Args:
        decision: the gate's answer.
        serving: what still serves, for the operator.
        next_command: the command to run next, for the operator.

    Raises:
        PatchctlError: exit code 8 on hold, 6 on anything else. The code is the gate's own (``gate.*``)
            when it failed, else ``policy.held`` or ``policy.denied``.
    """
    if decision.outcome == "allow":
        return
    held = decision.outcome == "hold"
    own = next((finding.id for finding in decision.denied if finding.id.startswith("gate.")), "")
    raise PatchctlError(
        code=own or ("policy.held" if held else "policy.denied"),
        what="the policy gate holds this change" if held else "the policy gate refuses this change",
        why="; ".join(f"{finding.id}: {finding.message}" for finding in decision.reasons) or "no reason was given",
        exit_code=ExitCode.HELD if held else ExitCode.POLICY_DENIED,
        serving=serving,
        next_command=next_command,
    )
