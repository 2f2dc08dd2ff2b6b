"""BAKE: the new generation serves on probation while its failures and its memory are watched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from patchctl.agent.context import HostContext
from patchctl.agent.ending import Wholeness, check_on_probation
from patchctl.agent.evidence import Evidence
from patchctl.agent.settings import BakeLimits
from patchctl.agent.watch import monotonic_s
from patchctl.bundle.config import Declared
from patchctl.errors import ExitCode, PatchctlError

# How often failures are looked at; the rollback follows within one step boundary plus this.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Counters:
    """What must not move while a generation is on probation, and what must."""

    requests_completed: int
    requests_failed: int
    nonfinite_rows: int


def breach(before: Counters, now: Counters) -> str:
    """Why the probation ends at once, or "". Pure."""
    if now.nonfinite_rows > before.nonfinite_rows:
        return f"{now.nonfinite_rows - before.nonfinite_rows} rows of non-finite logits"
    if now.requests_failed > before.requests_failed:
        return f"{now.requests_failed - before.requests_failed} requests failed"
    return ""


def bake(
    context: HostContext,
    evidence: Evidence,
    declared: Declared,
    *,
    generation: int,
    drained: bool,
    wholeness: Wholeness,
) -> dict[str, Any]:
    """Wait out the settle time, then the growth window, extended while it shows nothing either way.

    ``drained``: the responses still open on the old request path are those that a hard stop cut off. They
    end as failures in a moment, and that is not the new generation's doing.

    Raises:
        PatchctlError: ``bake.breach`` as soon as the host or the engine itself sees a failure,
            ``bake.too_few_requests`` when traffic is too thin for a verdict, ``host.process_lost``,
            ``host.stopping``.
    """
    limits = context.settings.bake
    swapped_s = monotonic_s()

    def sound() -> Counters:
        context.sleep(_LOOK_S)
        wholeness.check()
        return _counters(context, generation)

    before = _counters(context, generation)
    while drained and monotonic_s() - swapped_s < limits.settle_s_max and _old_responses(context, generation):
        before = sound()

    def look() -> Counters:
        now = sound()
        if why := breach(before, now):
            raise _not_baked("bake.breach", why)
        return now

    while (settled_s := monotonic_s() - swapped_s) < limits.settle_s_max and (
        settled_s < limits.settle_s_min or _old_responses(context, generation)
    ):
        look()
    evidence.begin_after_window()
    started, start = monotonic_s(), _counters(context, generation)
    while True:
        now = look()
        baked_s = monotonic_s() - started
        requests = now.requests_completed - start.requests_completed
        if requests >= limits.requests_min and baked_s >= _window_s(limits, evidence.growth_so_far(declared)):
            return {"note": f"{requests} requests in {baked_s:.1f} s, none failed", "requests": requests}
        if baked_s >= limits.bake_s_max:
            raise _not_baked(
                "bake.too_few_requests", f"{requests} requests in {baked_s:.0f} s, {limits.requests_min} are needed"
            )


def _window_s(limits: BakeLimits, growth: Literal["none", "shown", "unclear"]) -> float:
    """How long the window must be, given what it shows so far.

    A heap that is still filling up looks like a leak at first. A leak goes on, so growth counts only
    when it is still shown after twice the time.
    """
    return {"none": limits.bake_s, "shown": min(2 * limits.bake_s, limits.bake_s_max), "unclear": limits.bake_s_max}[
        growth
    ]


def _counters(context: HostContext, generation: int) -> Counters:
    front, engine = context.host.front_stats(), context.host.engine_stats()
    check_on_probation(engine, generation)
    return Counters(front["requests_completed"], front["requests_failed"], engine["nonfinite_rows"])


def _old_responses(context: HostContext, generation: int) -> int:
    """Responses still running on another generation's request path."""
    paths = context.host.front_stats()["paths"]
    return sum(path["responses_open"] for path in paths if path["generation"] != generation)


def _not_baked(code: str, why: str) -> PatchctlError:
    return PatchctlError(
        code=code,
        what="the new generation did not pass its probation",
        why=why,
        exit_code=ExitCode.ROLLED_BACK,
        serving="the build that served before, after the exchange back",
        next_command="patchctl history -o json",
    )
