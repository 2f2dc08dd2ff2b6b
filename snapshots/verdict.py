"""From evidence to a decision: commit, rollback or hold. Pure.

Each finding has one class; the worst class present decides (:data:`OUTCOME_OF`). Nothing is presumed: what was not
seen is ``unknown``, and unknown never commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from snapshots.diff import HostDiff
from snapshots.findings import Effect, Finding
from snapshots.growth_findings import GrowthEvidence, growth_findings
from snapshots.process_findings import process_findings
from snapshots.tensor_findings import exchange_findings, resident_findings

__all__ = [
    "OUTCOME_OF",
    "DeclaredEffects",
    "Effect",
    "Finding",
    "GrowthEvidence",
    "Outcome",
    "Verdict",
    "VerdictLimits",
    "judge",
]

Outcome = Literal["commit", "rollback", "hold"]

# In ascending weight: the outcome of a verdict is that of the heaviest effect found.
OUTCOME_OF: Mapping[Effect, Outcome] = {
    "unchanged": "commit",
    "expected": "commit",
    "unknown": "hold",
    "growth": "rollback",
    "corruption": "rollback",
}
_WEIGHT: Mapping[Outcome, int] = {"commit": 0, "hold": 1, "rollback": 2}


@dataclass(frozen=True, slots=True)
class DeclaredEffects:
    """What the signed patch says it changes.

    Attributes:
        tensors: names or globs (``model.layers.3.*``; ``*`` also matches dots) that may differ between the builds.
        growth_bytes_per_request_max: role → growth it may show; a role that is absent declares nothing, and is
            held to its growth before the patch.
    """

    tensors: tuple[str, ...] = ()
    growth_bytes_per_request_max: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VerdictLimits:
    """What the host demands of the evidence.

    Attributes:
        roles: processes that must be covered: request-path code runs in the front, tensors live in the engine.
        growth_noise_bytes_per_request: two pages. Resident memory moves by pages, and one request in flight at
            either end of the window shifts a floor by one each.
        blind_accepted: globs of mappings or gaps whose content this host accepts not to see, e.g. ``/dev/nvidia*``.
            Empty by default: blind is unknown.
    """

    roles: tuple[str, ...] = ("front", "engine")
    growth_noise_bytes_per_request: int = 8192
    blind_accepted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision and everything it rests on."""

    outcome: Outcome
    findings: tuple[Finding, ...]

    @property
    def reasons(self) -> tuple[Finding, ...]:
        """The findings that decided the outcome."""
        return tuple(finding for finding in self.findings if OUTCOME_OF[finding.effect] == self.outcome)

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON-ready data."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


_DEFAULT_LIMITS = VerdictLimits()


def judge(
    diff: HostDiff,
    declared: DeclaredEffects,
    growth: Mapping[str, GrowthEvidence],
    limits: VerdictLimits = _DEFAULT_LIMITS,
) -> Verdict:
    """Decide on a patch after its bake.

    Args:
        diff: from a snapshot with the old generation serving and the new one staged, to one after the bake with
            the new one serving and the old one still resident.
        declared: the patch's declared effects.
        growth: per role, memory growth per request before and after.
        limits: the host's demands.

    Returns:
        ``rollback`` on any growth or corruption, else ``hold`` on anything unknown, else ``commit``.
    """
    findings = (
        *exchange_findings(diff.exchange, declared.tensors),
        *resident_findings(diff),
        *process_findings(diff, limits.roles, limits.blind_accepted),
        *growth_findings(
            growth, declared.growth_bytes_per_request_max, limits.roles, limits.growth_noise_bytes_per_request
        ),
    )
    outcome = max((OUTCOME_OF[finding.effect] for finding in findings), key=_WEIGHT.__getitem__)
    return Verdict(outcome, findings)
