"""The memory governor: whether, how and after what a build may be staged. Pure.

The rule: stage only if ``used + W_new + 1.5 * G_est + workspace`` stays within 0.85 of the total. When
it does not, memory that nobody needs is freed first, in the order of what that costs; then weights are
copied into the serving generation's own in chunks, which takes no second set; else the build is refused,
with every number that led there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import EngineError
from engine.swap import CommitMode

# Of the total: the rest is for what no estimate sees (allocator fragments, page tables, other processes
# of the host), and the kernel begins to reclaim and stall well before the last page.
STAGE_PERCENT_MAX = 85
# Graph memory is the one term that is estimated, not counted.
GRAPHS_PERCENT = 150
Relief = Literal["reclaim_prefix_kv", "retire_generations", "shrink_kv"]
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class MemoryRefusedError(EngineError):
    """A build does not fit, whatever is freed; the message has the arithmetic."""

    code = "memory_refused"


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the device, in bytes; see :mod:`engine.memory` for what counts as used."""

    used_bytes: int
    total_bytes: int

    @property
    def used_fraction(self) -> float:
        """0 to 1, or more when a limit was set below what is in use."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def limit_bytes(self) -> int:
        """What staging may reach."""
        return self.total_bytes * STAGE_PERCENT_MAX // 100


@dataclass(frozen=True, slots=True)
class Need:
    """What a build takes beside everything in use now, in bytes.

    Attributes:
        weights_bytes: weight files that no resident generation has mapped.
        graphs_bytes: estimate for all graphs; 0 where they own no device memory.
        workspace_bytes: static buffers, kernel workspace, KV of its own if the layout differs.
        copy_bytes: what overwriting the serving generation's weights takes meanwhile; None where topology
            or addresses differ from it.
    """

    weights_bytes: int
    graphs_bytes: int
    workspace_bytes: int
    copy_bytes: int | None = None

    def bytes_for(self, mode: CommitMode) -> int:
        """Bytes on top of what is in use: ``W + 1.5 G + workspace``, or what copying takes and workspace."""
        if mode == "copy":
            assert self.copy_bytes is not None
            return self.copy_bytes + self.workspace_bytes
        return self.weights_bytes + self.graphs_bytes * GRAPHS_PERCENT // 100 + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class Freeable:
    """What could be freed without failing a request, in bytes; 0 where there is nothing.

    Attributes:
        prefix_kv_bytes: KV blocks kept for their prefix alone; costs later requests a longer prefill.
        retired_bytes: generations released but not freed yet; costs waiting for their last launch.
        kv_shrink_bytes: free blocks of a pool that is larger than its running sequences need, where the
            pool can shrink. 0 when pages of free blocks are returned to the system anyway: they are not
            in use then, and giving them up frees nothing.
    """

    prefix_kv_bytes: int = 0
    retired_bytes: int = 0
    kv_shrink_bytes: int = 0

    @property
    def steps(self) -> tuple[tuple[Relief, int], ...]:
        """In the order in which they are tried: cheapest for the clients first."""
        return (
            ("reclaim_prefix_kv", self.prefix_kv_bytes),
            ("retire_generations", self.retired_bytes),
            ("shrink_kv", self.kv_shrink_bytes),
        )


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How to stage: free these first, then stage in ``commit_mode``.

    Attributes:
        relief: what to free and how many bytes of it, in order.
        peak_bytes: in use at the most while staging, as estimated.
        arithmetic: the sum that allows it, for reports.
    """

    commit_mode: CommitMode
    relief: tuple[tuple[Relief, int], ...]
    peak_bytes: int
    arithmetic: str


def plan_stage(
    memory: Memory, need: Need, freeable: Freeable, *, commit_mode: Literal["auto", "exchange", "copy"] = "auto"
) -> StagePlan:
    """Decide about one build.

    Args:
        memory: in use and in total.
        need: of the build.
        freeable: what may be freed for it.
        commit_mode: the mode asked for; ``auto`` copies only when there is no memory for an exchange.

    Raises:
        MemoryRefusedError: no allowed mode fits.
    """
    allowed: tuple[CommitMode, ...] = ("exchange", "copy") if commit_mode == "auto" else (commit_mode,)
    possible: tuple[CommitMode, ...] = tuple(
        mode for mode in allowed if mode == "exchange" or need.copy_bytes is not None
    )
    for mode in possible:
        short = memory.used_bytes + need.bytes_for(mode) - memory.limit_bytes
        relief = _relief(freeable, short)
        if relief is not None:
            peak_bytes = memory.used_bytes - sum(size for _, size in relief) + need.bytes_for(mode)
            return StagePlan(mode, relief, peak_bytes, _arithmetic(memory, need, mode))
    raise MemoryRefusedError(_refusal(memory, need, freeable, allowed, possible))


def _relief(freeable: Freeable, short_bytes: int) -> tuple[tuple[Relief, int], ...] | None:
    """Whole steps, as few as cover ``short_bytes``; None when all of them do not."""
    taken: list[tuple[Relief, int]] = []
    for name, size_bytes in freeable.steps:
        if short_bytes <= 0:
            break
        if size_bytes > 0:
            taken.append((name, size_bytes))
            short_bytes -= size_bytes
    return tuple(taken) if short_bytes <= 0 else None


def _arithmetic(memory: Memory, need: Need, mode: CommitMode) -> str:
    if mode == "copy":
        assert need.copy_bytes is not None
        terms = f"copying {_size(need.copy_bytes)}"
    else:
        graphs = need.graphs_bytes * GRAPHS_PERCENT // 100
        terms = f"weights {_size(need.weights_bytes)} + graphs {_size(graphs)} (1.5 * {_size(need.graphs_bytes)})"
    peak_bytes = memory.used_bytes + need.bytes_for(mode)
    return (
        f"used {_size(memory.used_bytes)} + {terms} + workspace {_size(need.workspace_bytes)} = {_size(peak_bytes)}, "
        f"limit {_size(memory.limit_bytes)} ({STAGE_PERCENT_MAX} % of {_size(memory.total_bytes)})"
    )


def _refusal(
    memory: Memory, need: Need, freeable: Freeable, allowed: tuple[CommitMode, ...], possible: tuple[CommitMode, ...]
) -> str:
    parts = [f"{mode}: {_arithmetic(memory, need, mode)}" for mode in possible]
    if "copy" in allowed and "copy" not in possible:
        parts.append("copy: not possible, the graphs or the tensors differ from the serving generation's")
    freed = " + ".join(f"{name} {_size(size)}" for name, size in freeable.steps)
    smallest = min((memory.used_bytes + need.bytes_for(mode) for mode in possible), default=None)
    if smallest is not None:
        short_bytes = smallest - sum(size for _, size in freeable.steps) - memory.limit_bytes
        parts.append(f"freeable: {freed}; still short of {_size(short_bytes)}")
    return "no memory to stage the build: " + "; ".join(parts)


def _size(size_bytes: int) -> str:
    """Exact below 1 KiB, else with three decimals: small enough that the printed numbers add up."""
    for unit_bytes, name in _UNITS:
        if abs(size_bytes) >= unit_bytes:
            return f"{size_bytes / unit_bytes:.3f} {name}"
    return f"{size_bytes} B"
