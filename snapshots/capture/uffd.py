"""Arming: the target process puts its own private memory under write tracking.

Only the process itself may register its memory with userfaultfd; from then on any process that may open its
``pagemap`` can ask which pages were written (:mod:`snapshots.capture.pages`). Measured on one core, kernel 6.18:
16 ms to arm 4 GiB; about 1 µs for the first write to a page; +3 % CPU while serving.

What stays outside, and how it shows:

- memory mapped after arming (call again), moved by mremap, and everything in a forked child: not registered, so
  a capture hashes it in full;
- shared mappings: another process's writes bypass this one's page tables, so they are never registered;
- hugetlb: tracked in 2 MiB units only, so not registered;
- writes by devices into pinned pages: invisible. A capture names the gap, and hashes the regions of io_uring's
  registered buffers in full; RDMA, and a direct read (O_DIRECT) that is under way during a scan, it can't place;

Pages given back with MADV_DONTNEED read as zeros from then on, and are reported as written.
A transparent huge page is split by its first tracked write: memory access gets slower, never wrong.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from dataclasses import dataclass, replace

from snapshots.capture import kernel
from snapshots.capture.errors import CaptureError
from snapshots.capture.vmas import Mapping, read_maps

# Runs of untouched pages per call: the kernel's own buffer holds as many.
_RUNS = 512


@dataclass(frozen=True, slots=True)
class ArmReport:
    """What :func:`arm_self` did.

    Attributes:
        armed: False when this process is not tracked at all; ``reason`` says why.
        registered: mappings put under tracking by this call.
        registered_bytes: their size.
        already: mappings that earlier calls had registered; their written pages are kept.
        skipped: ``(start, end, reason)`` of private writable mappings that stay untracked.
        arm_ms: wall time of this call.
    """

    armed: bool
    reason: str = ""
    registered: int = 0
    registered_bytes: int = 0
    already: int = 0
    skipped: tuple[tuple[int, int, str], ...] = ()
    arm_ms: float = 0.0


class _Armed:
    """The userfaultfd of this process; tracking ends when it closes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.uffd = -1

    def forget(self) -> None:
        """In a forked child: the descriptor tracks the parent's memory, not ours."""
        self.lock = threading.Lock()
        if self.uffd >= 0:
            os.close(self.uffd)
            self.uffd = -1


_armed = _Armed()
os.register_at_fork(after_in_child=_armed.forget)


def trackable(mapping: Mapping) -> bool:
    """True for private memory whose every write goes through this process's page tables.

    Reserved ranges (``---p``) are left out: marking costs page tables, 0.2 % of the size, and some runtimes reserve
    hundreds of GiB. What is opened up in them later is new memory until the next arming.
    """
    return mapping.private and mapping.writable and mapping.kind not in ("device", "hugetlb", "special")


def _tracked(pagemap: int, mapping: Mapping, slot: ctypes.Array[ctypes.c_char]) -> bool:
    """Whether a mapping is registered already: asking for one page of it is refused when it is not."""
    try:
        kernel.pagemap_scan(
            pagemap,
            mapping.start,
            mapping.start + kernel.PAGE_BYTES,
            require=kernel.WRITTEN,
            flags=kernel.CHECK_WPASYNC,
            vec_address=ctypes.addressof(slot),
            vec_len=1,
        )
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        return False
    return True


def _mark_all(pagemap: int, start: int, end: int) -> None:
    """Mark every page clean. Without a result vector the kernel takes a short cut and ignores all categories."""
    kernel.pagemap_scan(pagemap, start, end, require=kernel.WRITTEN, flags=kernel.WP_MATCHING)


def _mark_untouched(pagemap: int, start: int, end: int) -> None:
    """Mark the pages clean that were never touched, and no other."""
    runs = (ctypes.c_uint64 * (3 * _RUNS))()
    found = _RUNS
    while start < end and found == _RUNS:
        found = kernel.pagemap_scan(
            pagemap,
            start,
            end,
            require=0,
            exclude=kernel.PRESENT | kernel.SWAPPED,
            flags=kernel.WP_MATCHING,
            vec_address=ctypes.addressof(runs),
            vec_len=_RUNS,
        )
        start = runs[3 * found - 2] if found else end


def _register_all(uffd: int, pagemap: int, *, first: bool) -> ArmReport:
    """Register what is trackable and not yet registered.

    The first time all memory is marked clean: tracking begins here. Memory that appears later has been written
    since, so only its untouched pages are marked; the next scan reports the others.
    """
    mark = _mark_all if first else _mark_untouched
    registered = registered_bytes = already = 0
    skipped: list[tuple[int, int, str]] = []
    slot = ctypes.create_string_buffer(24)
    for mapping in read_maps(os.getpid()):
        if not trackable(mapping):
            continue
        try:
            if _tracked(pagemap, mapping, slot):
                already += 1
                continue
            kernel.register_write_tracking(uffd, mapping.start, mapping.end)
            mark(pagemap, mapping.start, mapping.end)
        except OSError as error:  # unmapped meanwhile by another thread, or a kind that can't be tracked
            skipped.append((mapping.start, mapping.end, error.strerror or str(error)))
            continue
        registered += 1
        registered_bytes += mapping.end - mapping.start
    return ArmReport(
        armed=True,
        registered=registered,
        registered_bytes=registered_bytes,
        already=already,
        skipped=tuple(skipped),
    )


def arm_self() -> ArmReport:
    """Track writes to this process's private memory from now on; call again to cover newer mappings.

    Written pages that no scan has reported yet stay reported.

    Never raises: where the kernel or the rights don't allow it the report says so, and captures fall back to
    hashing every page.
    """
    begun = time.perf_counter()
    with _armed.lock:
        pagemap = -1
        try:
            pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            first = _armed.uffd < 0
            if first:
                _armed.uffd = kernel.open_userfaultfd()
            report = _register_all(_armed.uffd, pagemap, first=first)
        except (OSError, CaptureError) as error:
            return ArmReport(armed=False, reason=str(error))
        finally:
            if pagemap >= 0:
                os.close(pagemap)
    return replace(report, arm_ms=(time.perf_counter() - begun) * 1e3)
