"""Which pages of another process were written, and which are resident.

Order matters: scan and re-arm in one step, then read (:mod:`snapshots.capture.reader`). A write that lands in between
is reported by the next scan; the other order would lose it.
"""

from __future__ import annotations

import errno
import os
import secrets
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from snapshots.capture import kernel
from snapshots.capture.reader import PageNumbers
from snapshots.capture.vmas import Mapping, reading, start_ticks
from snapshots.model import RegionKind, TrackerScan

# Runs fetched per PAGEMAP_SCAN: 96 KiB of buffer; 1 % dirty of 1 GiB takes one call.
_RUNS_PER_SCAN = 4096
# Classic pagemap entries (8 bytes a page) read at once where PAGEMAP_SCAN is missing: 2 MiB for 1 GiB of memory.
_ENTRIES_PER_READ = 1 << 18
_ENTRY_RESIDENT = np.uint64(3 << 62)  # present, or swapped
_ENTRY_FILE = np.uint64(1 << 61)

_Runs = npt.NDArray[np.uint64]
_NO_PAGES: PageNumbers = np.zeros(0, dtype=np.uint64)
_NO_RUNS: _Runs = np.zeros((0, 3), dtype=np.uint64)


def _expand(runs: _Runs) -> PageNumbers:
    """``(n, 3)`` address runs to ascending page numbers."""
    first = runs[:, 0] >> np.uint64(kernel.PAGE_SHIFT)
    length = (runs[:, 1] - runs[:, 0]) >> np.uint64(kernel.PAGE_SHIFT)
    ends = np.cumsum(length, dtype=np.uint64)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - (ends - length), length.astype(np.intp)) + np.arange(total, dtype=np.uint64)


class PagemapScanner:
    """PAGEMAP_SCAN over another process, with one buffer for all scans. Not thread-safe."""

    def __init__(self, pid: int) -> None:
        """Open the process's pagemap.

        Raises:
            CaptureError: it is gone, or the kernel refuses.
        """
        self.pid = pid
        with reading(pid):
            self._pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._runs = np.zeros((_RUNS_PER_SCAN, 3), dtype=np.uint64)

    def close(self) -> None:
        """Release the descriptor."""
        if self._pagemap >= 0:
            os.close(self._pagemap)
            self._pagemap = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def written(self, start: int, end: int, *, private_file: bool = False) -> PageNumbers | None:
        """Pages of ``[start, end)`` written since the previous call, marked clean again in the same step.

        Args:
            start: address.
            end: address.
            private_file: leave out pages that are still the file's own (costs a lookup per page).

        Returns:
            Ascending page numbers, or None when some of the range is not under write tracking.
        """
        # Zero pages are not left out: memory given back (MADV_DONTNEED) and read again is one, and it has changed.
        exclude = kernel.FILE if private_file else 0
        flags = kernel.WP_MATCHING | kernel.CHECK_WPASYNC
        try:
            return self._scan(start, end, require=kernel.WRITTEN, exclude=exclude, flags=flags)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOTTY):
                return None
            raise

    def resident(self, start: int, end: int, *, private_file: bool = False) -> PageNumbers:
        """Pages of ``[start, end)`` that are present or swapped out; ``private_file`` as in :meth:`written`."""
        exclude = kernel.FILE if private_file else 0
        try:
            exclude |= kernel.never_content()
            return self._scan(start, end, any_of=kernel.PRESENT | kernel.SWAPPED, exclude=exclude)
        except OSError as error:
            if error.errno != errno.ENOTTY:
                raise
            return self._resident_by_entries(start, end, private_file=private_file)

    def present_bytes(self, start: int, end: int, *, without_file: bool = False) -> int:
        """Memory in ``[start, end)`` that is present, zero pages left out.

        Args:
            start: address.
            end: address.
            without_file: leave out pages that are a file's (costs a lookup per page: five times slower).

        Raises:
            OSError: ENOTTY where the kernel has no PAGEMAP_SCAN.
        """
        exclude = kernel.never_content() | (kernel.FILE if without_file else 0)
        runs = self._scan_runs(start, end, require=kernel.PRESENT, exclude=exclude)
        return int((runs[:, 1] - runs[:, 0]).sum())

    def _scan(
        self, start: int, end: int, *, require: int = 0, exclude: int = 0, any_of: int = 0, flags: int = 0
    ) -> PageNumbers:
        return _expand(self._scan_runs(start, end, require=require, exclude=exclude, any_of=any_of, flags=flags))

    def _scan_runs(
        self,
        start: int,
        end: int,
        *,
        require: int = 0,
        exclude: int = 0,
        any_of: int = 0,
        flags: int = 0,
    ) -> _Runs:
        parts: list[_Runs] = []
        found = _RUNS_PER_SCAN
        while start < end and found == _RUNS_PER_SCAN:
            found = kernel.pagemap_scan(
                self._pagemap,
                start,
                end,
                require=require,
                exclude=exclude,
                any_of=any_of,
                flags=flags,
                vec_address=self._runs.ctypes.data,
                vec_len=_RUNS_PER_SCAN,
            )
            if found:
                parts.append(self._runs[:found].copy())
                start = int(self._runs[found - 1, 1])
        return np.concatenate(parts) if parts else _NO_RUNS

    def _resident_by_entries(self, start: int, end: int, *, private_file: bool) -> PageNumbers:
        """The same from the classic pagemap, 8 bytes a page: kernels before 6.7."""
        parts: list[PageNumbers] = []
        first, last = start >> kernel.PAGE_SHIFT, end >> kernel.PAGE_SHIFT
        for number in range(first, last, _ENTRIES_PER_READ):
            count = min(_ENTRIES_PER_READ, last - number)
            entries = np.frombuffer(os.pread(self._pagemap, count * 8, number * 8), dtype="<u8")
            keep = (entries & _ENTRY_RESIDENT) != 0
            if private_file:
                keep &= (entries & _ENTRY_FILE) == 0
            parts.append(np.flatnonzero(keep).astype(np.uint64) + np.uint64(number))
        return np.concatenate(parts) if parts else _NO_PAGES


class WriteTracker(PagemapScanner):
    """Counts the scans of one armed process, so that a diff knows which writes lie between two captures.

    Every capture with this tracker marks the written pages clean, so one process has one tracker.

    Attributes:
        kinds: of the mapped files, as ``smaps`` last told them: see :mod:`snapshots.capture.listing`.
    """

    def __init__(self, pid: int) -> None:
        """Open the process's pagemap.

        Raises:
            CaptureError: it is gone, or the kernel refuses.
        """
        super().__init__(pid)
        self.start_ticks = start_ticks(pid)
        self.kinds: dict[Mapping, RegionKind] = {}
        self._session = secrets.token_hex(4)
        self._scans = 0

    def next_scan(self) -> TrackerScan:
        """Begin the next scan."""
        self._scans += 1
        return TrackerScan(self._session, self._scans)
