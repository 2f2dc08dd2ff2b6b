"""Who allocated: Python's own allocation trace, started and read inside the target on demand.

``tracemalloc`` sees what goes through Python's allocators, so not the memory of native libraries (tensors among it).
While it traces, every allocation costs a walk of ``frames`` frames, and live ones cost memory: it is for finding the
place of a growth that was already seen, in a window of its own, never a standing watch.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

Stack = tuple[str, ...]

# Enough to tell the callers of a shared helper apart; each more is walked on every allocation.
FRAMES = 8
# Stacks in a snapshot, largest first: what grows per request is among them, or too small to matter.
_STACKS_MAX = 500


@dataclass(frozen=True, slots=True)
class StackTotal:
    """Live memory of one stack. ``stack`` is innermost first, as ``file:line``."""

    stack: Stack
    size_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class StackSnapshot:
    """Live memory by stack, the largest first, allocated since the trace began.

    Attributes:
        traced_bytes: over all stacks, those left out too.
        left_out: stacks beyond the largest.
    """

    traced_bytes: int
    totals: tuple[StackTotal, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class StackDelta:
    """What one stack holds more (or less) than before."""

    stack: Stack
    grown_bytes: int
    grown_blocks: int


def start_stacks(frames: int = FRAMES) -> bool:
    """Begin to trace; False when somebody traces already (their trace is left alone)."""
    if tracemalloc.is_tracing():
        return False
    tracemalloc.start(frames)
    return True


def stop_stacks() -> None:
    """End the trace and free what it recorded."""
    tracemalloc.stop()


def take_stacks() -> StackSnapshot | None:
    """What is allocated now, by stack; None where nothing traces. The trace's own memory is left out."""
    if not tracemalloc.is_tracing():
        return None
    own = [tracemalloc.Filter(inclusive=False, filename_pattern=name) for name in (tracemalloc.__file__, __file__)]
    found = tracemalloc.take_snapshot().filter_traces(own).statistics("traceback")
    totals = tuple(
        StackTotal(
            tuple(f"{frame.filename}:{frame.lineno}" for frame in reversed(entry.traceback)), entry.size, entry.count
        )
        for entry in found[:_STACKS_MAX]
    )
    return StackSnapshot(sum(entry.size for entry in found), totals, max(0, len(found) - _STACKS_MAX))


def stack_deltas(before: StackSnapshot, after: StackSnapshot) -> tuple[StackDelta, ...]:
    """What changed between two snapshots of one trace, the largest growth first. Pure."""
    old = {total.stack: total for total in before.totals}
    new = {total.stack: total for total in after.totals}
    nothing = StackTotal((), 0, 0)
    deltas = []
    for stack in old.keys() | new.keys():
        first, second = old.get(stack, nothing), new.get(stack, nothing)
        if (first.size_bytes, first.blocks) != (second.size_bytes, second.blocks):
            deltas.append(StackDelta(stack, second.size_bytes - first.size_bytes, second.blocks - first.blocks))
    return tuple(sorted(deltas, key=lambda delta: (-delta.grown_bytes, delta.stack)))
