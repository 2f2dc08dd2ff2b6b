"""The port every Rego engine stands behind, and the one error it may raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from patchctl.admission.policy import PolicySet

ENTRYPOINT = "data.patchctl.gate.decision"


@dataclass(eq=False, slots=True)
class EngineError(Exception):
    """An engine gave no usable answer; the gate turns it into a deny.

    Attributes:
        code: ``gate.engine_crashed``, ``gate.engine_timeout``, ``gate.engine_missing``,
            ``gate.engine_unreachable``, ``gate.policy_failed``, ``gate.policy_mismatch``,
            ``gate.result_undefined`` or ``gate.result_malformed``.
        why: the cause, and what to do about it.
    """

    code: str
    why: str

    def __str__(self) -> str:
        return f"{self.code}: {self.why}"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A defined result, not yet judged, and who computed it."""

    value: Any
    engine_version: str


class PolicyEngine(Protocol):
    """Evaluates one query of a policy on one input, without keeping anything between two calls."""

    @property
    def name(self) -> str:
        """Which engine this is, for the decision and the operator."""

    def evaluate(self, policy: PolicySet, document: bytes, query: str = ENTRYPOINT) -> Evaluation:
        """Evaluate ``query`` with the JSON ``document`` as input.

        Raises:
            EngineError: no defined result; the caller must deny.
        """

    def close(self) -> None:
        """Free processes and connections; the engine may not be used afterwards."""
