"""What growth estimates mean against the declared maximum, or against the growth before the patch. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from snapshots.findings import Finding, size_text
from snapshots.growth import Growth, GrowthEstimate, Insufficient
from snapshots.noise import IdleNoise, margin_per_request


@dataclass(frozen=True, slots=True)
class GrowthEvidence:
    """One process's growth on the old generation and on the new one.

    Sample ``after`` from the swap plus a settle time, so that staging's one-time allocations lie outside it.

    Attributes:
        idle: how far the same process moved by itself before the patch, None when it never idled.
    """

    before: Growth
    after: Growth
    idle: IdleNoise | None = None


def growth_findings(
    growth: Mapping[str, GrowthEvidence], declared_max: Mapping[str, int], roles: tuple[str, ...], noise: int
) -> Iterator[Finding]:
    """One finding per required or sampled role, plus one per one-time step; sizes in bytes per request.

    ``noise`` is the margin that may be excused. Growth beyond it, but within what the process showed while it idled,
    is neither excused nor proven.
    """
    for role in (*roles, *sorted(growth.keys() - set(roles))):
        subject = f"memory per request of {role}"
        evidence = growth.get(role)
        if evidence is None:
            yield Finding("unknown", subject, "was not sampled", action="sample the process during the bake")
        elif isinstance(evidence.after, Insufficient):
            yield Finding(
                "unknown",
                subject,
                f"can't be estimated: {evidence.after.reason}",
                _rate(evidence.before),
                action="send traffic and extend the bake",
            )
        else:
            yield _growth_finding(subject, evidence, evidence.after, declared_max.get(role), noise)
            yield from _step_findings(subject, evidence.after)


def _growth_finding(
    subject: str, evidence: GrowthEvidence, after: GrowthEstimate, declared: int | None, noise: int
) -> Finding:
    """Hold the interval after the swap against the allowance.

    The allowance is the declared maximum; undeclared, it is the growth before the patch if that was real (a window
    too noisy to show growth allows none). Above it lies the noise margin.
    """
    before = evidence.before
    grew = isinstance(before, GrowthEstimate) and before.low > noise
    allowed = declared if declared is not None else before.high if grew and isinstance(before, GrowthEstimate) else 0
    source = "declared" if declared is not None else "before the patch" if grew else "undeclared"
    limit = allowed + noise
    figures = (_rate(before), _rate(after))
    feigned = margin_per_request(evidence.idle, after.requests, noise)
    if limit < after.low <= allowed + feigned:
        return Finding(
            "unknown",
            subject,
            f"grows by more than {size_text(limit)}; idle, the process moves by {size_text(feigned)} per request",
            *figures,
            "extend the bake, or send more traffic",
        )
    if after.low > limit:
        return Finding(
            "growth",
            subject,
            f"grows by more than {size_text(limit)} ({source} {size_text(allowed)} + {size_text(noise)} noise)",
            *figures,
            "look for per-request state that outlives its response",
        )
    if after.high > limit:
        return Finding(
            "unknown",
            subject,
            f"growth beyond {size_text(limit)} can't be ruled out: the interval is too wide",
            *figures,
            "extend the bake, or send more traffic",
        )
    if grew and after.high <= noise:
        return Finding("expected", subject, "growth removed", *figures)
    if after.low > noise:
        still = "grows within its declared maximum" if declared is not None else "grows as it did before the patch"
        return Finding("expected" if declared is not None else "unchanged", subject, still, *figures)
    return Finding("unchanged", subject, "no growth", *figures)


def _step_findings(subject: str, after: GrowthEstimate) -> Iterator[Finding]:
    for step in after.steps:
        moved = "rose" if step.bytes > 0 else "fell"
        at = f"{step.progress:.0f} {after.progress}"
        yield Finding(
            "expected",
            subject,
            f"{moved} once by {size_text(abs(step.bytes))} at {at}: not counted as growth",
        )


def _rate(growth: Growth) -> str:
    if isinstance(growth, Insufficient):
        return f"not known ({growth.reason})"
    return (
        f"{size_text(growth.bytes_per_request)}/request (95 %: {size_text(growth.low)} to {size_text(growth.high)}; "
        f"{growth.requests} requests)"
    )
