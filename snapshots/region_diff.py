"""Compare the memory of one process at two times, region by region. Pure.

Regions are compared by the addresses they cover, not one to one: mappings split and merge (arming alone does that),
and memory that merely changed its neighbours is neither new nor gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from snapshots.model import PAGE_BYTES, Confidence, PageSet, ProcessSnapshot, Region, RegionKind

# new/gone: no address in common with the other side. grown/shrunk: some. changed: content differs where both
# have memory. unseen: both have memory, and at least one side could not tell its content.
RegionEvent = Literal["new", "gone", "grown", "shrunk", "changed", "unseen"]


@dataclass(frozen=True, slots=True)
class RegionChange:
    """One event of one region.

    Attributes:
        event: what happened.
        bytes: new, gone, grown, shrunk: bytes mapped or unmapped; changed: bytes of the pages that differ;
            unseen: bytes that nobody could look at.
        writable: the process could write it, before or after.
        confidence: of this finding.
        reason: why not exact, "" otherwise.
    """

    event: RegionEvent
    start: int
    end: int
    perms: str
    kind: RegionKind
    name: str
    bytes: int
    writable: bool
    confidence: Confidence
    reason: str = ""

    @property
    def label(self) -> str:
        """How a human would point at it."""
        return f"{self.name or f'[{self.kind}]'} {self.start:x}-{self.end:x} {self.perms}"


_RegionKey = tuple[RegionKind, str]


def _by_key(regions: Iterable[Region]) -> dict[_RegionKey, list[Region]]:
    groups: dict[_RegionKey, list[Region]] = {}
    for region in sorted(regions, key=lambda r: r.start):
        # The kernel appends this once the file is unlinked; the memory is the same.
        name = region.name.removesuffix(" (deleted)")
        groups.setdefault((region.kind, name), []).append(region)
    return groups


def diff_regions(before: ProcessSnapshot, after: ProcessSnapshot) -> tuple[RegionChange, ...]:
    """Every event between two captures of the same process, in address order."""
    old, new = _by_key(before.regions), _by_key(after.regions)
    later = _later_side(before, after)
    changes: list[RegionChange] = []
    for key in old.keys() | new.keys():
        mine, theirs = old.get(key, []), new.get(key, [])
        pairs = _overlaps(mine, theirs)
        changes += _extent_events(mine, [(a, span) for a, _, span in pairs], "gone", "shrunk")
        changes += _extent_events(theirs, [(b, span) for _, b, span in pairs], "new", "grown")
        for first, second, (low, high) in pairs:
            changes += _content_events(first, second, low, high, later)
    return tuple(sorted(changes, key=lambda c: (c.start, c.end, c.event)))


_Span = tuple[int, int]


def _overlaps(old: list[Region], new: list[Region]) -> list[tuple[Region, Region, _Span]]:
    """Pairs of regions that share addresses, and the span they share. Both lists ascend and don't self-overlap."""
    pairs: list[tuple[Region, Region, _Span]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        low, high = max(old[i].start, new[j].start), min(old[i].end, new[j].end)
        if low < high:
            pairs.append((old[i], new[j], (low, high)))
        if old[i].end <= new[j].end:
            i += 1
        else:
            j += 1
    return pairs


def _extent_events(
    regions: list[Region], shared: list[tuple[Region, _Span]], whole: RegionEvent, part: RegionEvent
) -> list[RegionChange]:
    """Events of regions that the other side has not at all (``whole``) or not in full (``part``)."""
    covered: dict[int, int] = {}
    for region, (low, high) in shared:
        covered[region.start] = covered.get(region.start, 0) + high - low
    events = []
    for region in regions:
        common = covered.get(region.start, 0)
        if common < region.size_bytes:
            events.append(
                RegionChange(
                    event=part if common else whole,
                    start=region.start,
                    end=region.end,
                    perms=region.perms,
                    kind=region.kind,
                    name=region.name,
                    bytes=region.size_bytes - common,
                    writable="w" in region.perms,
                    confidence=region.confidence,
                    reason=region.reason,
                )
            )
    return events


_Later = Literal["before", "after"] | None


def _later_side(before: ProcessSnapshot, after: ProcessSnapshot) -> _Later:
    """Whose written pages lie exactly between the two captures: the later scan's, if the scans adjoin."""
    if before.scan is None or after.scan is None or before.scan.session != after.scan.session:
        return None
    step = after.scan.scan - before.scan.scan
    return "after" if step == 1 else "before" if step == -1 else None


def _content_events(first: Region, second: Region, low: int, high: int, later: _Later) -> list[RegionChange]:
    event: RegionEvent
    confidence: Confidence
    blind = next((r for r in (second, first) if r.confidence == "blind"), None)
    if blind is not None:
        event, size_bytes, confidence, reason = "unseen", high - low, "blind", blind.reason
    else:
        size_bytes, reason = _changed_bytes(first, second, low, high, later)
        if not size_bytes:
            return []
        exact = not reason and first.confidence == second.confidence == "exact"
        event, confidence = "changed", "exact" if exact else "conservative"
        reason = reason or second.reason or first.reason
    return [
        RegionChange(
            event=event,
            start=low,
            end=high,
            perms=second.perms,
            kind=second.kind,
            name=second.name,
            bytes=size_bytes,
            writable="w" in first.perms or "w" in second.perms,
            confidence=confidence,
            reason=reason,
        )
    ]


def _changed_bytes(first: Region, second: Region, low: int, high: int, later: _Later) -> tuple[int, str]:
    """Bytes that differ in ``[low, high)``, and why the figure is not exact ("" when it is)."""
    tracked = [region.method == "write_tracking" for region in (first, second)]
    if not any(tracked):
        return _differing_pages(first.pages, second.pages, low, high) * PAGE_BYTES, ""
    latest = second if later == "after" else first
    if later is not None and all(tracked):
        return len(_within(latest.pages, low, high)[0]) * PAGE_BYTES, ""
    upper = min(high - low, max(first.anonymous_bytes, second.anonymous_bytes))
    return upper, "write tracking began, ended or skipped between the snapshots: counted as wholly changed"


_Words = npt.NDArray[np.uint64]


def _within(pages: PageSet, low: int, high: int) -> tuple[_Words, _Words]:
    """Page numbers and digests inside ``[low, high)``."""
    numbers: _Words = np.frombuffer(pages.numbers, dtype="<u8")
    digests: _Words = np.frombuffer(pages.digests, dtype="<u8")
    first, last = np.searchsorted(numbers, np.array([low // PAGE_BYTES, high // PAGE_BYTES], dtype=np.uint64))
    return numbers[first:last], digests[first:last]


def _differing_pages(first: PageSet, second: PageSet, low: int, high: int) -> int:
    """Pages whose digests differ, or that only one side has (the other reads zeros, or the file)."""
    numbers_a, digests_a = _within(first, low, high)
    numbers_b, digests_b = _within(second, low, high)
    common, at_a, at_b = np.intersect1d(numbers_a, numbers_b, assume_unique=True, return_indices=True)
    only_one = len(numbers_a) + len(numbers_b) - 2 * len(common)
    return only_one + int(np.count_nonzero(digests_a[at_a] != digests_b[at_b]))
