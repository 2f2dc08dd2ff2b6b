"""What differs between two host snapshots, in both directions. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from snapshots.model import Gap, GenerationState, HostSnapshot, ProcessSnapshot, TensorState
from snapshots.region_diff import RegionChange, diff_regions

TensorEvent = Literal["new", "gone", "changed"]


@dataclass(frozen=True, slots=True)
class ProcessDiff:
    """One process, before and after.

    Attributes:
        replaced: pid or start time differ: it is another process, and no region is compared.
        gaps: what either capture could not cover.
        regions: events in address order.
    """

    role: str
    pid_before: int
    pid_after: int
    replaced: bool
    rss_before_bytes: int
    rss_after_bytes: int
    anonymous_before_bytes: int
    anonymous_after_bytes: int
    regions: tuple[RegionChange, ...]
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor that differs. ``before`` is None when new, ``after`` is None when gone."""

    name: str
    event: TensorEvent
    before: TensorState | None
    after: TensorState | None


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """The tensors of one generation against those of another, or of itself later. ``changes`` by name."""

    generation_before: int
    generation_after: int
    build_before: str
    build_after: str
    tensors: int
    changes: tuple[TensorChange, ...]


@dataclass(frozen=True, slots=True)
class HostDiff:
    """Everything that differs between two host snapshots.

    Attributes:
        exchange: the generation serving before, as it was before, against the one serving after, as it is after.
        resident: each generation resident in both snapshots, against itself.
        generations_new: resident only after.
        generations_gone: resident only before.
        processes: each role captured in both.
        roles_new: captured only after.
        roles_gone: captured only before.
    """

    exchange: TensorDiff
    resident: tuple[TensorDiff, ...]
    generations_new: tuple[int, ...]
    generations_gone: tuple[int, ...]
    processes: tuple[ProcessDiff, ...]
    roles_new: tuple[str, ...]
    roles_gone: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The diff as JSON-ready data."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


def diff(before: HostSnapshot, after: HostSnapshot) -> HostDiff:
    """Compare two snapshots of one host.

    ``diff(a, b)`` and ``diff(b, a)`` mirror each other: new ↔ gone, grown ↔ shrunk, the same bytes changed.
    """
    numbers_before = {state.generation for state in before.generations}
    numbers_after = {state.generation for state in after.generations}
    roles_before, roles_after = set(before.processes), set(after.processes)
    return HostDiff(
        exchange=diff_tensors(before.active, after.active),
        resident=tuple(
            diff_tensors(state, later)
            for state in sorted(before.generations, key=lambda s: s.generation)
            if (later := after.state_of(state.generation)) is not None
        ),
        generations_new=tuple(sorted(numbers_after - numbers_before)),
        generations_gone=tuple(sorted(numbers_before - numbers_after)),
        processes=tuple(
            diff_process(before.processes[role], after.processes[role]) for role in sorted(roles_before & roles_after)
        ),
        roles_new=tuple(sorted(roles_after - roles_before)),
        roles_gone=tuple(sorted(roles_before - roles_after)),
    )


def diff_tensors(before: GenerationState, after: GenerationState) -> TensorDiff:
    """Compare two generations (or one with itself later) tensor by tensor."""
    names = sorted(set(before.tensors) | set(after.tensors))
    changes = [
        TensorChange(name, _tensor_event(old, new), old, new)
        for name in names
        if (old := before.tensors.get(name)) != (new := after.tensors.get(name))
    ]
    return TensorDiff(
        before.generation, after.generation, before.build_digest, after.build_digest, len(names), tuple(changes)
    )


def _tensor_event(before: TensorState | None, after: TensorState | None) -> TensorEvent:
    if before is None:
        return "new"
    return "gone" if after is None else "changed"


def diff_process(before: ProcessSnapshot, after: ProcessSnapshot) -> ProcessDiff:
    """Compare two captures of one role."""
    replaced = (before.pid, before.start_ticks) != (after.pid, after.start_ticks)
    return ProcessDiff(
        role=after.role,
        pid_before=before.pid,
        pid_after=after.pid,
        replaced=replaced,
        rss_before_bytes=before.rss_bytes,
        rss_after_bytes=after.rss_bytes,
        anonymous_before_bytes=before.anonymous_bytes,
        anonymous_after_bytes=after.anonymous_bytes,
        regions=() if replaced else diff_regions(before, after),
        gaps=tuple(sorted({*before.gaps, *after.gaps}, key=lambda gap: (gap.subject, gap.reason, gap.blind))),
    )
