"""Which pages were written, which are resident, and what is in them — of another process.

Order matters: scan and re-arm in one step, then read. A write that lands in between is reported by the next scan;
the other order would lose it.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import xxhash

from snapshots.capture import kernel
from snapshots.capture.errors import AccessDeniedError, ProcessGoneError
from snapshots.capture.vmas import reading, start_ticks
from snapshots.model import PageSet, TrackerScan

PageNumbers = npt.NDArray[np.uint64]

# Pages per read and hash pass: 512 KiB, so that they are still in a cache when they are hashed. From 32 to 256 pages
# the time is the same within 20 %.
_BATCH_PAGES = 128
# Runs fetched per PAGEMAP_SCAN: 96 KiB of buffer; 1 % dirty of 1 GiB takes one call.
_RUNS_PER_SCAN = 4096
# Classic pagemap entries (8 bytes a page) read at once where PAGEMAP_SCAN is missing: 2 MiB for 1 GiB of memory.
_ENTRIES_PER_READ = 1 << 18
_ENTRY_RESIDENT = np.uint64(3 << 62)  # present, or swapped
_ENTRY_FILE = np.uint64(1 << 61)

_NO_PAGES: PageNumbers = np.zeros(0, dtype=np.uint64)
ZERO_PAGE_DIGEST = xxhash.xxh3_64_intdigest(bytes(kernel.PAGE_BYTES))


def _expand(runs: npt.NDArray[np.uint64]) -> PageNumbers:
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

    def _scan(
        self, start: int, end: int, *, require: int = 0, exclude: int = 0, any_of: int = 0, flags: int = 0
    ) -> PageNumbers:
        parts: list[PageNumbers] = []
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
                parts.append(_expand(self._runs[:found]))
                start = int(self._runs[found - 1, 1])
        return np.concatenate(parts) if parts else _NO_PAGES

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
    """

    def __init__(self, pid: int) -> None:
        """Open the process's pagemap.

        Raises:
            CaptureError: it is gone, or the kernel refuses.
        """
        super().__init__(pid)
        self.start_ticks = start_ticks(pid)
        self._session = secrets.token_hex(4)
        self._scans = 0

    def next_scan(self) -> TrackerScan:
        """Begin the next scan."""
        self._scans += 1
        return TrackerScan(self._session, self._scans)


class PageReader:
    """Reads pages of another process and hashes each. Not thread-safe."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Page-aligned: the kernel copies into a buffer that is off by 16 bytes (numpy's own) at half the speed.
        self._memory = mmap.mmap(-1, _BATCH_PAGES * kernel.PAGE_BYTES)
        self._buffer = np.frombuffer(self._memory, dtype=np.uint8)
        view = memoryview(self._memory)
        # Sliced once: making a view per page costs as much as hashing the page.
        self._views = [view[at : at + kernel.PAGE_BYTES] for at in range(0, len(view), kernel.PAGE_BYTES)]

    def digest(self, numbers: PageNumbers) -> tuple[PageSet, int]:
        """Read and hash pages, given in ascending order.

        Returns:
            The pages that could be read, and how many could not (unmapped meanwhile, or not readable).

        Raises:
            ProcessGoneError: the process ended.
            AccessDeniedError: the kernel refused.
        """
        digests: list[bytes] = []
        unread = self._digest(numbers, digests)
        if unread:
            numbers = numbers[np.isin(np.arange(len(numbers)), unread, invert=True)]
        packed = np.frombuffer(b"".join(digests), dtype=">u8").astype("<u8")
        return PageSet(numbers.astype("<u8").tobytes(), packed.tobytes()), len(unread)

    def _digest(self, numbers: PageNumbers, digests: list[bytes]) -> list[int]:
        """Append the digest of every readable page; returns the indices of the others."""
        unread: list[int] = []
        iov, first = _plan_batches(numbers)
        for batch, begin in enumerate(range(0, len(numbers), _BATCH_PAGES)):
            pages = min(_BATCH_PAGES, len(numbers) - begin)
            ranges = iov[first[batch] : first[batch + 1]]
            read = self._read(ranges, pages)
            digests.extend(map(xxhash.xxh3_64_digest, self._views[:read]))
            if read < pages:  # rare: skip the rest of the range that can't be read, and take the rest anew
                ends = np.cumsum(ranges[:, 1] >> np.uint64(kernel.PAGE_SHIFT))
                rest = begin + int(ends[np.searchsorted(ends, read, side="right")])
                unread.extend(range(begin + read, rest))
                unread += [rest + index for index in self._digest(numbers[rest : begin + pages], digests)]
        return unread

    def _read(self, iov: npt.NDArray[np.uint64], pages: int) -> int:
        """Read one batch into the buffer; returns how many of its pages came before the first unreadable one."""
        local = self._buffer.ctypes.data
        try:
            copied = kernel.process_vm_readv(self.pid, local, pages * kernel.PAGE_BYTES, iov.ctypes.data, len(iov))
        except ProcessLookupError as error:
            raise ProcessGoneError(self.pid, "it ended while being read") from error
        except PermissionError as error:
            raise AccessDeniedError(self.pid, str(error)) from error
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            return 0
        return copied >> kernel.PAGE_SHIFT


def _plan_batches(numbers: PageNumbers) -> tuple[npt.NDArray[np.uint64], list[int]]:
    """Remote ranges of ascending pages, no range crossing a batch.

    Returns:
        ``(ranges, 2)`` of start address and length in bytes; and per batch the index of its first range, closed by
        the number of ranges.
    """
    starts_range = np.ones(len(numbers), dtype=np.bool_)
    starts_range[1:] = np.diff(numbers) != 1
    starts_range[::_BATCH_PAGES] = True
    begin = np.flatnonzero(starts_range)
    iov = np.empty((len(begin), 2), dtype=np.uint64)
    iov[:, 0] = numbers[begin] << np.uint64(kernel.PAGE_SHIFT)
    iov[:, 1] = np.diff(np.append(begin, len(numbers))).astype(np.uint64) << np.uint64(kernel.PAGE_SHIFT)
    first = np.searchsorted(begin, np.arange(0, len(numbers), _BATCH_PAGES))
    return iov, [*first.tolist(), len(begin)]


def without_zero_pages(pages: PageSet) -> PageSet:
    """Drop all-zero pages: absent private memory reads as zeros, so both must compare equal."""
    digests = np.frombuffer(pages.digests, dtype="<u8")
    keep = digests != np.uint64(ZERO_PAGE_DIGEST)
    if keep.all():
        return pages
    numbers = np.frombuffer(pages.numbers, dtype="<u8")
    return PageSet(numbers[keep].tobytes(), digests[keep].tobytes())
