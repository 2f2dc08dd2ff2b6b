"""Three figures called fragmentation, each by its own name; and what grew, by pool and stack. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from snapshots.device.allocator import AllocatorSnapshot, PoolId, Segment, Stack


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """One pool of one device.

    Attributes:
        reserved_bytes: taken from the driver.
        active_bytes: in blocks that the program holds, or that a stream still uses.
        awaiting_free_bytes: the latter alone.
        requested_bytes: what the program asked for, of the active blocks.
        free_bytes: in free blocks.
        largest_free_bytes: the largest allocation that fits without asking the driver.
        releasable_bytes: segments without an active block: the allocator can give them back.
    """

    device: int
    pool: PoolId
    segments: int
    blocks: int
    reserved_bytes: int
    active_bytes: int
    awaiting_free_bytes: int
    requested_bytes: int
    free_bytes: int
    largest_free_bytes: int
    releasable_bytes: int

    @property
    def unused_share(self) -> float:
        """1 - active/reserved: what the process keeps from others without using it. 0 when nothing is reserved."""
        return 1 - self.active_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    @property
    def scattered_share(self) -> float:
        """1 - largest free block/free: how far the free memory is of no use to one large allocation."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0

    @property
    def rounding_share(self) -> float:
        """1 - requested/active: lost to the allocator's block sizes."""
        return 1 - self.requested_bytes / self.active_bytes if self.active_bytes else 0.0


def pool_figures(snapshot: AllocatorSnapshot) -> tuple[PoolFigures, ...]:
    """Figures of every pool, by device and pool."""
    groups: dict[tuple[int, PoolId], list[Segment]] = {}
    for segment in snapshot.segments:
        groups.setdefault((segment.device, segment.pool), []).append(segment)
    return tuple(_figures(device, pool, groups[device, pool]) for device, pool in sorted(groups))


def _figures(device: int, pool: PoolId, segments: list[Segment]) -> PoolFigures:
    blocks = [block for segment in segments for block in segment.blocks]
    active = [block for block in blocks if block.state != "free"]
    free = [block.size_bytes for block in blocks if block.state == "free"]
    return PoolFigures(
        device=device,
        pool=pool,
        segments=len(segments),
        blocks=len(blocks),
        reserved_bytes=sum(segment.size_bytes for segment in segments),
        active_bytes=sum(block.size_bytes for block in active),
        awaiting_free_bytes=sum(block.size_bytes for block in active if block.state == "awaiting_free"),
        requested_bytes=sum(block.requested_bytes for block in active),
        free_bytes=sum(free),
        largest_free_bytes=max(free, default=0),
        releasable_bytes=sum(
            segment.size_bytes for segment in segments if all(block.state == "free" for block in segment.blocks)
        ),
    )


@dataclass(frozen=True, slots=True)
class StackGrowth:
    """Active memory of one pool and stack, before and after."""

    device: int
    pool: PoolId
    stack: Stack
    before_bytes: int
    after_bytes: int
    before_blocks: int
    after_blocks: int

    @property
    def grown_bytes(self) -> int:
        """Negative when it shrank."""
        return self.after_bytes - self.before_bytes


_Key = tuple[int, PoolId, Stack]


def _by_stack(segments: Iterable[Segment]) -> dict[_Key, tuple[int, int]]:
    totals: dict[_Key, tuple[int, int]] = {}
    for segment in segments:
        for block in segment.blocks:
            if block.state != "free":
                key = (segment.device, segment.pool, block.stack)
                size, count = totals.get(key, (0, 0))
                totals[key] = (size + block.size_bytes, count + 1)
    return totals


def stack_growth(before: AllocatorSnapshot, after: AllocatorSnapshot) -> tuple[StackGrowth, ...]:
    """What changed per pool and stack, the largest growth first. Stacks need the allocator's history to be recorded."""
    old, new = _by_stack(before.segments), _by_stack(after.segments)
    rows = [
        StackGrowth(
            *key, old.get(key, (0, 0))[0], new.get(key, (0, 0))[0], old.get(key, (0, 0))[1], new.get(key, (0, 0))[1]
        )
        for key in old.keys() | new.keys()
        if old.get(key) != new.get(key)
    ]
    return tuple(sorted(rows, key=lambda row: (-row.grown_bytes, row.device, row.pool, row.stack)))
