"""Known answers: facts, settings and the expected decision; run against an engine before it is trusted.

The vectors in ``policies/vectors`` were written by hand from the table of checks, not from any engine's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec

from patchctl.admission.decision import Decision, Finding, Outcome
from patchctl.admission.engine import PolicyEngine
from patchctl.admission.facts import Action, GateInput, decode_input
from patchctl.admission.gate import decide
from patchctl.admission.policy import PolicySet


class _Vector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    base: Action
    changes: dict[str, Any]
    settings: dict[str, Any]
    outcome: Outcome
    denied: tuple[str, ...]
    held: tuple[str, ...]


class _Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    settings: dict[str, Any]
    inputs: dict[Action, dict[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """One vector: facts, policy settings, and what must come out of them.

    Attributes:
        settings: laid over the policy's own with :meth:`PolicySet.with_data`.
        denied: ids of the denying checks, sorted.
        held: ids of the holding checks, sorted.
    """

    name: str
    settings: dict[str, Any]
    facts: GateInput
    outcome: Outcome
    denied: tuple[str, ...]
    held: tuple[str, ...]

    def matches(self, decision: Decision) -> bool:
        """True when outcome and ids are the expected ones."""
        return (
            decision.outcome == self.outcome
            and _ids(decision.denied) == self.denied
            and _ids(decision.held) == self.held
        )


def _ids(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    return tuple(sorted({finding.id for finding in findings}))


def _known_answer(vector: _Vector, base: _Base) -> KnownAnswer:
    facts = {group: dict(fields) for group, fields in base.inputs[vector.base].items()}
    for path, value in vector.changes.items():
        group, _, field = path.partition(".")
        if field not in facts[group]:
            raise ValueError(f"vector {vector.name!r} changes {path}, which is no fact")
        facts[group][field] = value
    return KnownAnswer(
        vector.name,
        {**base.settings, **vector.settings},
        decode_input(msgspec.json.encode(facts)),
        vector.outcome,
        vector.denied,
        vector.held,
    )


def load_known_answers() -> tuple[KnownAnswer, ...]:
    """The vectors shipped in ``policies/vectors``: changes to the inputs of ``base.json``, and the answers."""
    folder = files("policies") / "vectors"
    base = msgspec.json.decode((folder / "base.json").read_bytes(), type=_Base)
    entries = sorted((entry for entry in folder.iterdir() if entry.name != "base.json"), key=lambda entry: entry.name)
    return tuple(
        _known_answer(vector, base)
        for entry in entries
        for vector in msgspec.json.decode(entry.read_bytes(), type=list[_Vector])
    )


def failing_known_answers(policy: PolicySet, engine: PolicyEngine) -> tuple[str, ...]:
    """Names of the shipped vectors that ``policy`` on ``engine`` answers differently; empty when all agree.

    Raises:
        PatchctlError: ``policy.invalid``: a vector's settings do not fit the policy.
    """
    return tuple(
        answer.name
        for answer in load_known_answers()
        if not answer.matches(decide(answer.facts, policy.with_data(answer.settings), engine))
    )
