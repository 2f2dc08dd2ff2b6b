"""Capture one process: its mappings, what was written, what is resident, and what could not be seen."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace

import numpy as np

from snapshots.capture.blind_spots import BlindSpots, children, device_writes
from snapshots.capture.errors import CaptureError, ProcessGoneError
from snapshots.capture.kernel import PAGE_SHIFT
from snapshots.capture.listing import Listing, list_regions
from snapshots.capture.pages import PagemapScanner, WriteTracker
from snapshots.capture.reader import PageDigests, PageNumbers, PageReader, page_set, without_zero_pages
from snapshots.capture.shared import data_offsets, open_backing, readable_in_full
from snapshots.capture.vmas import Mapping, Usage, read_anonymous_bytes, read_maps, reading, start_ticks
from snapshots.growth import MemorySample
from snapshots.model import PAGE_BYTES, Confidence, Gap, Method, PageSet, ProcessSnapshot, Region

_NO_PAGES = PageSet()
_NONE: PageNumbers = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class _Content:
    """How a region's content is established.

    Attributes:
        numbers: pages to read from the process, ascending.
        pages: pages that were read already (from the file behind a shared mapping).
        drop_zeros: an absent page reads as zeros here, so pages of zeros are left out.
        unread: pages that could not be read.
    """

    method: Method
    confidence: Confidence
    reason: str = ""
    numbers: PageNumbers = field(default_factory=lambda: _NONE)
    pages: PageSet = _NO_PAGES
    drop_zeros: bool = False
    unread: int = 0


def _without_reading(mapping: Mapping, usage: Usage) -> _Content | None:
    """Regions whose content needs no reading, or allows none; None for all others."""
    if mapping.kind == "special":
        return _Content("none", "exact")
    if mapping.kind == "device":
        return _Content("none", "blind", reason="device memory: not readable from outside, written by the device")
    if not mapping.private and not mapping.writable and not readable_in_full(mapping):
        return _Content("file_backed", "conservative", reason="large shared file: another process may write it")
    if mapping.kind == "file" and not mapping.writable and not usage.anonymous_bytes:
        return _Content("file_backed", "exact")
    if mapping.private and "r" not in mapping.perms and not usage.rss_bytes and not usage.swap_bytes:
        return _Content("none", "exact")  # reserved address space
    return None


class _Capture:
    """One pass over the regions of one process: scan them all, then read what they need in as few calls as possible."""

    def __init__(self, pid: int, scanner: PagemapScanner, blind: BlindSpots, *, tracked: bool) -> None:
        self._pid = pid
        self._scanner = scanner
        self._blind = blind
        self._tracked = tracked
        self._reader = PageReader(pid)

    def contents(self, listed: Listing) -> list[_Content]:
        """The content of every region, by the best method each allows."""
        planned = [self._plan(mapping, usage) for mapping, usage in listed]
        numbers = np.concatenate([content.numbers for content in planned]) if planned else _NONE
        found = self._reader.digest(numbers)
        read: list[_Content] = []
        at = 0
        for content in planned:
            end = at + len(content.numbers)
            part = PageDigests(found.digests[at:end], found.readable[at:end])
            at = end
            read.append(_with_pages(content, part) if len(content.numbers) else content)
        return read

    def _plan(self, mapping: Mapping, usage: Usage) -> _Content:
        settled = _without_reading(mapping, usage)
        if settled is not None:
            return settled
        if not mapping.private:
            return self._shared(mapping, usage)
        device_writes = self._blind.touch(mapping.start, mapping.end)
        if self._tracked and not device_writes:
            tracked = self._written(mapping)
            if tracked is not None:
                return tracked
        numbers = self._resident(mapping, usage)
        # In a private file mapping an absent page is the file's own, not zeros.
        return _Content("page_hash", "exact", numbers=numbers, drop_zeros=mapping.kind != "file")

    def _written(self, mapping: Mapping) -> _Content | None:
        assert isinstance(self._scanner, WriteTracker)
        numbers = self._scanner.written(mapping.start, mapping.end, private_file=mapping.kind == "file")
        if numbers is None:  # not armed
            return None
        return _Content("write_tracking", "exact", numbers=numbers)

    def _resident(self, mapping: Mapping, usage: Usage) -> PageNumbers:
        if not usage.rss_bytes and not usage.swap_bytes:
            return _NONE
        private_file = mapping.private and mapping.kind == "file"
        return self._scanner.resident(mapping.start, mapping.end, private_file=private_file)

    def _shared(self, mapping: Mapping, usage: Usage) -> _Content:
        """All of the memory behind a shared mapping; where it can't be opened, what this process has touched of it."""
        if readable_in_full(mapping) and (pages := self._backing_pages(mapping)) is not None:
            return _Content("page_hash", "exact", pages=pages)
        numbers = self._resident(mapping, usage)
        if len(numbers) * PAGE_BYTES >= mapping.end - mapping.start:
            return _Content("page_hash", "exact", numbers=numbers, drop_zeros=True)
        reason = "shared memory: pages that only other processes touched are not seen"
        return _Content("page_hash", "blind", reason, numbers, drop_zeros=True)

    def _backing_pages(self, mapping: Mapping) -> PageSet | None:
        """The pages of the file behind a mapping that are not all zeros; None where it can't be read."""
        fd = open_backing(self._pid, mapping)
        if fd is None:
            return None
        try:
            offsets = data_offsets(fd, mapping.offset, mapping.offset + mapping.end - mapping.start)
            found = self._reader.digest_file(fd, offsets)
        except OSError:
            return None
        finally:
            os.close(fd)
        numbers = ((offsets - mapping.offset + mapping.start) >> PAGE_SHIFT).astype(np.uint64)
        return without_zero_pages(page_set(numbers, found))


def _with_pages(content: _Content, found: PageDigests) -> _Content:
    pages = page_set(content.numbers, found)
    unread = len(content.numbers) - len(pages)
    return replace(content, pages=without_zero_pages(pages) if content.drop_zeros else pages, unread=unread)


def _region(mapping: Mapping, usage: Usage, content: _Content) -> Region:
    return Region(
        start=mapping.start,
        end=mapping.end,
        perms=mapping.perms,
        kind=mapping.kind,
        name=mapping.name,
        rss_bytes=usage.rss_bytes,
        anonymous_bytes=usage.anonymous_bytes + usage.swap_bytes,
        method=content.method,
        confidence=content.confidence,
        pages=content.pages,
        reason=content.reason,
    )


def _settle_unread(region: Region, unread: int, still: tuple[Mapping, ...]) -> tuple[Region | None, Gap | None]:
    """Judge a region with unreadable pages by what is mapped there now.

    Gone: only a remark, its memory no longer exists. Changed: what was read stands, as conservative evidence.
    Unchanged: the pages are there and can't be read, so the region is blind.
    """
    overlapping = [m for m in still if m.start < region.end and m.end > region.start]
    if not overlapping:
        return None, Gap(region.label, "unmapped while it was being read", blind=False)
    if any((m.start, m.end, m.perms) == (region.start, region.end, region.perms) for m in overlapping):
        reason = f"{unread} resident pages could not be read"
        return replace(region, confidence="blind", reason=reason), None
    reason = f"remapped while it was being read; {unread} pages were missed"
    return replace(region, confidence="conservative", reason=reason), None


def _read_regions(pid: int, listed: Listing, capture: _Capture) -> tuple[tuple[Region, ...], tuple[Gap, ...]]:
    contents = capture.contents(listed)
    read = [
        (_region(mapping, usage, content), content.unread)
        for (mapping, usage), content in zip(listed, contents, strict=True)
    ]
    # Listed again only after the last read: a mapping may vanish at any time before.
    still = read_maps(pid) if any(unread for _, unread in read) else ()
    settled = [_settle_unread(region, unread, still) if unread else (region, None) for region, unread in read]
    return (
        tuple(region for region, _ in settled if region is not None),
        tuple(gap for _, gap in settled if gap is not None),
    )


def capture_process(pid: int, role: str, *, tracker: WriteTracker | None = None) -> ProcessSnapshot:
    """Read one process from outside; it keeps running.

    With a tracker, armed regions are covered by their written pages since the tracker's previous scan; every
    other region of private or shared memory is hashed in full (about 0.3 s per GiB).

    Args:
        pid: the process; the caller may read its memory (its parent, or by CAP_SYS_PTRACE).
        role: ``front`` or ``engine``.
        tracker: the write tracker of this very process.

    Raises:
        ProcessGoneError: it ended before the capture was complete, or the pid is another process now.
        AccessDeniedError: the kernel refused to show its memory.
        CaptureError: a kernel interface is missing or failed.
    """
    began = start_ticks(pid)
    if tracker is not None and (tracker.pid, tracker.start_ticks) != (pid, began):
        raise ProcessGoneError(pid, "the tracker was opened for another process")
    scan = tracker.next_scan() if tracker is not None else None
    listed = list_regions(pid, tracker)
    scanner = tracker if tracker is not None else PagemapScanner(pid)
    try:
        with reading(pid):
            blind = device_writes(pid)
            capture = _Capture(pid, scanner, blind, tracked=tracker is not None)
            regions, gaps = _read_regions(pid, listed, capture)
    finally:
        if tracker is None:
            scanner.close()
    gaps += (*blind.gaps, *children(pid))
    # A process that died midway reads as if it had no memory: only this check tells.
    if start_ticks(pid) != began:
        raise ProcessGoneError(pid, "its pid now belongs to another process")
    if not listed:
        raise CaptureError(pid, "it has no memory of its own (a kernel thread)")
    return ProcessSnapshot(
        role=role,
        pid=pid,
        start_ticks=began,
        rss_bytes=sum(usage.rss_bytes for _, usage in listed),
        anonymous_bytes=sum(usage.anonymous_bytes + usage.swap_bytes for _, usage in listed),
        pss_bytes=sum(usage.pss_bytes for _, usage in listed),
        regions=regions,
        gaps=gaps,
        scan=scan,
    )


def sample_memory(pid: int, *, requests_completed: int, tokens: int) -> MemorySample:
    """One sample for the growth estimate: 0.1 ms; 13 ms per GiB resident on kernels before 6.17.

    Args:
        pid: the process.
        requests_completed: its counter, read just before this call.
        tokens: likewise.

    Raises:
        CaptureError: see :func:`capture_process`.
    """
    return MemorySample(
        t_s=time.monotonic(),
        anonymous_bytes=read_anonymous_bytes(pid),
        requests_completed=requests_completed,
        tokens=tokens,
    )
