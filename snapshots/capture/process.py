"""Capture one process: its mappings, what was written, what is resident, and what could not be seen."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from snapshots.capture.errors import CaptureError, ProcessGoneError
from snapshots.capture.pages import PagemapScanner, PageReader, WriteTracker, without_zero_pages
from snapshots.capture.vmas import Mapping, Usage, read_anonymous_bytes, read_maps, read_smaps, reading, start_ticks
from snapshots.growth import MemorySample
from snapshots.model import Confidence, Gap, Method, PageSet, ProcessSnapshot, Region

_NO_PAGES = PageSet()


@dataclass(frozen=True, slots=True)
class _Content:
    """How a region's content was established, and the pages that were read."""

    method: Method
    confidence: Confidence
    pages: PageSet = _NO_PAGES
    reason: str = ""
    unread: int = 0


def _without_reading(mapping: Mapping, usage: Usage) -> _Content | None:
    """Regions whose content needs no reading, or allows none; None for all others."""
    if mapping.kind == "special":
        return _Content("none", "exact")
    if mapping.kind == "device":
        return _Content("none", "blind", reason="device memory: not readable from outside, written by the device")
    if mapping.kind == "shared" and not mapping.writable:
        return _Content("file_backed", "conservative", reason="shared file: another process may write it")
    if mapping.kind == "file" and not mapping.writable and not usage.anonymous_bytes:
        return _Content("file_backed", "exact")
    if "r" not in mapping.perms and not usage.rss_bytes and not usage.swap_bytes:
        return _Content("none", "exact")  # reserved address space
    return None


class _Capture:
    """One pass over the regions of one process."""

    def __init__(self, pid: int, scanner: PagemapScanner, *, tracked: bool) -> None:
        self._scanner = scanner
        self._tracked = tracked
        self._reader = PageReader(pid)

    def content(self, mapping: Mapping, usage: Usage) -> _Content:
        """Establish the content of one region by the best method it allows."""
        settled = _without_reading(mapping, usage)
        if settled is not None:
            return settled
        if self._tracked and "uw" in usage.flags and mapping.private:
            tracked = self._written(mapping)
            if tracked is not None:
                return tracked
        return self._hashed(mapping, usage)

    def _written(self, mapping: Mapping) -> _Content | None:
        assert isinstance(self._scanner, WriteTracker)
        numbers = self._scanner.written(mapping.start, mapping.end, private_file=mapping.kind == "file")
        if numbers is None:  # remapped between listing and scanning
            return None
        pages, unread = self._reader.digest(numbers)
        return _Content("write_tracking", "exact", pages, unread=unread)

    def _hashed(self, mapping: Mapping, usage: Usage) -> _Content:
        pages, unread = _NO_PAGES, 0
        if usage.rss_bytes or usage.swap_bytes:
            numbers = self._scanner.resident(mapping.start, mapping.end, private_file=mapping.kind == "file")
            pages, unread = self._reader.digest(numbers)
        if mapping.kind == "shared":
            reason = "shared memory: pages that only other processes touched are not seen"
            return _Content("page_hash", "conservative", pages, reason, unread)
        if mapping.kind != "file":  # there an absent page is the file's own, not zeros
            pages = without_zero_pages(pages)
        return _Content("page_hash", "exact", pages, unread=unread)


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


def _registered_buffers(pid: int, fd: str) -> bool:
    try:
        with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as info:  # noqa: PTH123
            for line in info:
                key, _, value = line.partition(":")
                if key == "UserBufs":
                    return int(value) > 0
    except OSError:
        return False  # closed meanwhile
    return False


def _device_write_gaps(pid: int) -> Iterator[Gap]:
    """Devices that write into pinned private pages leave no mark: name what could do so."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names only, no Path per descriptor
    except OSError as error:
        yield Gap("descriptors", f"can't be listed ({error.strerror}): device writes can't be ruled out", blind=True)
        return
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - as above
        except OSError:
            continue  # closed meanwhile
        if target == "anon_inode:[io_uring]" and _registered_buffers(pid, name):
            yield Gap(f"io_uring:{name}", "writes through its registered buffers are not seen", blind=True)
        elif target.startswith("/dev/infiniband/"):
            yield Gap(target, "RDMA writes into registered memory are not seen", blind=True)


def _read_regions(
    pid: int, listed: tuple[tuple[Mapping, Usage], ...], capture: _Capture
) -> tuple[tuple[Region, ...], tuple[Gap, ...]]:
    read: list[tuple[Region, int]] = []
    for mapping, usage in listed:
        content = capture.content(mapping, usage)
        read.append((_region(mapping, usage, content), content.unread))
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
    listed = read_smaps(pid)
    scanner = tracker if tracker is not None else PagemapScanner(pid)
    try:
        with reading(pid):
            capture = _Capture(pid, scanner, tracked=tracker is not None)
            regions, gaps = _read_regions(pid, listed, capture)
    finally:
        if tracker is None:
            scanner.close()
    gaps += tuple(_device_write_gaps(pid))
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
