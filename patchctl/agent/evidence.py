"""The evidence of one transaction: two host snapshots, growth before and after, and the verdict on them."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec import to_builtins

from patchctl.agent.capture import capture_host, keep, live_tensors
from patchctl.agent.context import HostContext
from patchctl.agent.processes import ROLES
from patchctl.agent.watch import monotonic_s
from patchctl.atomic import write_atomic
from patchctl.bundle.config import Declared
from snapshots.capture.errors import CaptureError
from snapshots.capture.pages import WriteTracker
from snapshots.codec import SnapshotInvalidError, decode_snapshot, encode_snapshot
from snapshots.diff import diff
from snapshots.growth import Growth, GrowthEstimate, estimate_growth
from snapshots.growth_findings import GrowthEvidence, growth_findings
from snapshots.model import GenerationState, HostSnapshot
from snapshots.noise import learn_noise
from snapshots.store.store import Stored
from snapshots.verdict import DeclaredEffects, Verdict, VerdictLimits, judge


@dataclass(slots=True)
class _Windows:
    """Monotonic times that bound the growth windows."""

    before_start_s: float = 0.0
    before_end_s: float = 0.0
    after_start_s: float = 0.0
    after_end_s: float = 0.0


class Evidence:
    """Collects what the verdict rests on and keeps it, one folder per transaction."""

    def __init__(self, context: HostContext, transaction: str) -> None:
        self._context = context
        self._transaction = transaction
        self._folder: Path = context.home.evidence / transaction
        self._windows = _Windows()
        self._before: HostSnapshot | None = None
        self._after: HostSnapshot | None = None
        self._growth: dict[str, GrowthEvidence] = {}
        self._trackers: dict[str, WriteTracker] = {}

    def close(self) -> None:
        """Stop tracking."""
        for tracker in self._trackers.values():
            tracker.close()
        self._trackers.clear()

    def begin_before_window(self) -> None:
        """Staging starts now: the window that growth is compared with ends here."""
        self._windows.before_end_s = monotonic_s()
        self._windows.before_start_s = self._windows.before_end_s - self._context.settings.bake.before_s

    def begin_after_window(self) -> None:
        """The new generation serves alone now."""
        self._windows.after_start_s = monotonic_s()

    def take_before(self, *, old: int, new: int) -> dict[str, Any]:
        """Snapshot with ``old`` serving and ``new`` staged; write tracking starts from here."""
        self._context.host.arm()
        for role, pid in self._context.host.processes.pids.items():
            with suppress(CaptureError):  # without a tracker every page is hashed instead
                self._trackers[role] = WriteTracker(pid)
        self._before, figures = self._take("before", serving=old, old=old, new=new)
        return figures

    def take_after(self, *, old: int, new: int) -> dict[str, Any]:
        """Snapshot with ``new`` serving and ``old`` still resident."""
        self._windows.after_end_s = monotonic_s()
        self._after, figures = self._take("after", serving=new, old=old, new=new)
        return figures

    def judge(self, declared: Declared) -> Verdict:
        """The verdict; diff and verdict are kept beside the snapshots."""
        assert self._before is not None
        assert self._after is not None
        self._growth = self._estimate(self._windows.after_end_s)
        difference = diff(self._before, self._after)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        verdict = judge(difference, _effects(declared), self._growth)
        self._write("diff.json", difference.as_dict())
        self._write("samples.json", self._samples())
        self._write("verdict.json", verdict.as_dict())
        return verdict

    def growth_so_far(self, declared: Declared) -> Literal["none", "shown", "unclear"]:
        """What the samples since the swap say: growth ruled out for every process, shown for one, or neither."""
        limits, effects = VerdictLimits(), _effects(declared)
        findings = growth_findings(
            self._estimate(monotonic_s()),
            effects.growth_bytes_per_request_max,
            limits.roles,
            limits.growth_noise_bytes_per_request,
        )
        effects_found = {finding.effect for finding in findings}
        if "growth" in effects_found:
            return "shown"
        return "unclear" if "unknown" in effects_found else "none"

    def _estimate(self, until_s: float) -> dict[str, GrowthEvidence]:
        windows, watch = self._windows, self._context.watch
        before = watch.between(windows.before_start_s, windows.before_end_s)
        after = watch.between(windows.after_start_s, until_s)
        # All that is remembered from before the patch: the patch must not teach its own noise.
        earlier = watch.between(0.0, windows.before_end_s)
        return {
            role: GrowthEvidence(
                before=estimate_growth(before[role]),
                after=estimate_growth(after[role]),
                idle=learn_noise(earlier[role]),
            )
            for role in ROLES
        }

    def _samples(self) -> dict[str, dict[str, Any]]:
        """The readings behind the growth estimates, so that they can be checked later."""
        windows, watch = self._windows, self._context.watch
        before = watch.between(windows.before_start_s, windows.before_end_s)
        after = watch.between(windows.after_start_s, windows.after_end_s)
        return {role: {"before": to_builtins(before[role]), "after": to_builtins(after[role])} for role in ROLES}

    def growth_figures(self) -> dict[str, dict[str, float | None]]:
        """Bytes kept per request by each role, before and after; None where samples were too few."""
        return {
            role: {"before": _bytes_per_request(found.before), "after": _bytes_per_request(found.after)}
            for role, found in self._growth.items()
        }

    def _take(self, name: str, *, serving: int, old: int, new: int) -> tuple[HostSnapshot, dict[str, Any]]:
        """Capture both generations and keep the snapshot, with the bytes of the one that a rollback needs."""
        by_number = {entry.number: entry.digest for entry in self._context.journal.generations()}
        generations = [(number, by_number[number]) for number in (serving, new if serving == old else old)]
        captured = capture_host(self._context, generations, serving=serving, trackers=self._trackers)
        stored = keep(self._context, captured, (old,), label=name, transaction=self._transaction)
        return captured.snapshot, _figures(captured.snapshot, stored)

    def _write(self, name: str, data: dict[str, Any]) -> None:
        write_atomic(self._folder / name, json.dumps(data, indent=1).encode(), mode=0o600)


def _effects(declared: Declared) -> DeclaredEffects:
    limit = declared.growth_bytes_per_request_max
    return DeclaredEffects(
        tensors=declared.tensors,
        growth_bytes_per_request_max={} if limit is None else dict.fromkeys(ROLES, limit),
    )


def generation_file(context: HostContext, number: int) -> Path:
    """Where the tensor digests of a committed generation are kept: what a rollback must restore exactly."""
    return context.home.evidence / f"generation-{number}.json"


def committed_state(context: HostContext, number: int) -> dict[str, str] | None:
    """Tensor → digest of a generation as it was committed; None when that was not recorded, or cannot be read."""
    try:
        snapshot = decode_snapshot(generation_file(context, number).read_bytes())
    except (OSError, SnapshotInvalidError):
        return None
    return {name: tensor.digest for name, tensor in snapshot.active.tensors.items()}


def record_generation(context: HostContext, number: int) -> None:
    """Keep the tensor digests of the serving generation, unless they are kept already.

    Raises:
        PatchctlError: the engine does not answer.
    """
    if committed_state(context, number) is not None:
        return
    digest = next(entry.digest for entry in context.journal.generations() if entry.number == number)
    found = live_tensors(context.host.inspect(number))
    state = GenerationState(number, digest, {name: tensor.state for name, tensor in found.items()})
    snapshot = HostSnapshot(time.time_ns(), generation=number, generations=(state,), processes={})
    write_atomic(generation_file(context, number), encode_snapshot(snapshot), mode=0o600)


def _figures(snapshot: HostSnapshot, stored: Stored) -> dict[str, Any]:
    regions = sum(len(process.regions) for process in snapshot.processes.values())
    tensors = len(snapshot.active.tensors)
    written = sum(process.written_bytes for process in snapshot.processes.values())
    return {
        "note": f"{regions} regions, {tensors} tensors, {written / 2**20:.1f} MiB written since the last; "
        f"{stored.new_bytes / 2**20:.1f} MiB stored",
        "snapshot": stored.id,
        "regions": regions,
        "tensors": tensors,
        "written_bytes": written,
        "stored_bytes": stored.new_bytes,
        "anonymous_bytes": {role: process.anonymous_bytes for role, process in snapshot.processes.items()},
    }


def _bytes_per_request(growth: Growth) -> float | None:
    return round(growth.bytes_per_request, 1) if isinstance(growth, GrowthEstimate) else None
