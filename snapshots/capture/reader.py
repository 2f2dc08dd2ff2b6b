"""Reads pages of another process and hashes each: batched system calls, on every core that is idle."""

from __future__ import annotations

import errno
import functools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from snapshots.capture import kernel
from snapshots.capture.errors import AccessDeniedError, ProcessGoneError
from snapshots.model import PageSet

PageNumbers = npt.NDArray[np.uint64]
_Words = npt.NDArray[np.uint64]

# Pages per read and hash pass: 1 MiB, so that they are still in a cache when they are hashed, and one system call of at
# most 256 ranges (IOV_MAX allows 1024). With two threads 128 pages took a tenth longer, 64 almost half; 512 took
# as long.
_BATCH_PAGES = 256
# Four readers: the system call does most of the work and lets the others run, but the hashing of pages holds the
# interpreter lock (a quarter of the time), so that a fifth finds nothing to do.
_THREADS_MAX = 4
# Below this, waking a second thread is not worth it: 8 MiB, about 2 ms of reading.
_THREADED_PAGES_MIN = 2048

ZERO_PAGE_DIGEST = xxhash.xxh3_64_intdigest(bytes(kernel.PAGE_BYTES))


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """The helper threads of all readers: starting one costs as much as reading 100 pages."""
    return ThreadPoolExecutor(_THREADS_MAX - 1, thread_name_prefix="page-reader")


@dataclass(frozen=True, slots=True)
class PageDigests:
    """What :meth:`PageReader.digest` found, in the order of the pages asked for.

    Attributes:
        digests: u64 ``[pages]``, xxh3_64 of each page; 0 where it could not be read.
        readable: bool ``[pages]``.
    """

    digests: _Words
    readable: npt.NDArray[np.bool_]


class _Lane:
    """One thread's buffer: page-aligned, for the kernel copies at half the speed into one that is off by 16 bytes."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BATCH_PAGES * kernel.PAGE_BYTES)
        self.address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self.view = memoryview(self._memory)
        # Sliced once: making a view per page costs as much as hashing the page.
        self._views = [self.view[at : at + kernel.PAGE_BYTES] for at in range(0, len(self.view), kernel.PAGE_BYTES)]

    def hash(self, pages: int) -> _Words:
        """Digests of the first ``pages`` pages of the buffer."""
        digests = b"".join(map(xxhash.xxh3_64_digest, self._views[:pages]))
        return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


class PageReader:
    """Reads pages of one process. One call at a time."""

    def __init__(self, pid: int, *, threads_max: int = _THREADS_MAX) -> None:
        self.pid = pid
        self._lanes = [_Lane() for _ in range(max(1, min(threads_max, len(os.sched_getaffinity(0)))))]

    def digest(self, numbers: PageNumbers) -> PageDigests:
        """Read and hash pages, given in ascending order.

        Raises:
            ProcessGoneError: the process ended.
            AccessDeniedError: the kernel refused.
        """
        iov, first = _plan_batches(numbers)

        def work(lane: _Lane, batch: int, out: PageDigests) -> None:
            begin = batch * _BATCH_PAGES
            pages = min(_BATCH_PAGES, len(numbers) - begin)
            self._read_batch(lane, iov[first[batch] : first[batch + 1]], out, begin, pages)

        return self._run(len(numbers), work)

    def digest_file(self, fd: int, offsets: npt.NDArray[np.int64]) -> PageDigests:
        """Read and hash pages of an open file instead, at ascending ``offsets`` in bytes; ends short of it are zeros.

        Raises:
            OSError: the file can't be read.
        """

        def work(lane: _Lane, batch: int, out: PageDigests) -> None:
            begin = batch * _BATCH_PAGES
            wanted = offsets[begin : begin + _BATCH_PAGES]
            runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != kernel.PAGE_BYTES) + 1)
            at = 0
            for run in runs:
                piece = lane.view[at : at + len(run) * kernel.PAGE_BYTES]
                read = os.preadv(fd, [piece], int(run[0]))
                piece[read:] = bytes(len(piece) - read)
                at += len(piece)
            out.digests[begin : begin + len(wanted)] = lane.hash(len(wanted))
            out.readable[begin : begin + len(wanted)] = True

        return self._run(len(offsets), work)

    def _run(self, pages: int, work: Callable[[_Lane, int, PageDigests], None]) -> PageDigests:
        """Do ``work`` for every batch, by the calling thread and by helpers that take what it has not begun.

        The caller never waits for a helper that the scheduler has not started.
        """
        out = PageDigests(np.zeros(pages, np.uint64), np.zeros(pages, np.bool_))
        remaining = iter(range(-(-pages // _BATCH_PAGES)))  # one step of it is atomic

        def drain(lane: _Lane) -> None:
            for batch in remaining:
                work(lane, batch, out)

        helpers = self._lanes[1:] if pages >= _THREADED_PAGES_MIN else []
        if not helpers:
            drain(self._lanes[0])
            return out
        started = [_helpers().submit(drain, lane) for lane in helpers]
        try:
            drain(self._lanes[0])
        finally:
            running = [future for future in started if not future.cancel()]
            wait(running)
        for future in running:
            future.result()
        return out

    def _read_batch(self, lane: _Lane, ranges: _Words, out: PageDigests, begin: int, pages: int) -> None:
        """Read and hash one batch, passing over ranges that can't be read."""
        lengths = (ranges[:, 1] >> np.uint64(kernel.PAGE_SHIFT)).astype(np.intp)
        ends = np.cumsum(lengths)
        range_index = 0
        done = 0
        while done < pages:
            rest = ranges[range_index:]
            read = self._read(lane, rest, pages - done)
            out.digests[begin + done : begin + done + read] = lane.hash(read)
            out.readable[begin + done : begin + done + read] = True
            done += read
            if done < pages:  # rare: skip the rest of the range that can't be read, and take the others anew
                range_index = int(np.searchsorted(ends, done, side="right")) + 1
                done = int(ends[range_index - 1])

    def _read(self, lane: _Lane, iov: _Words, pages: int) -> int:
        """Read ranges into the lane's buffer; returns how many pages came before the first unreadable one."""
        size = pages * kernel.PAGE_BYTES
        try:
            copied = kernel.process_vm_readv(self.pid, lane.address, size, iov.ctypes.data, len(iov))
        except ProcessLookupError as error:
            raise ProcessGoneError(self.pid, "it ended while being read") from error
        except PermissionError as error:
            raise AccessDeniedError(self.pid, str(error)) from error
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            return 0
        return copied >> kernel.PAGE_SHIFT


def _plan_batches(numbers: PageNumbers) -> tuple[_Words, list[int]]:
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


def page_set(numbers: PageNumbers, found: PageDigests) -> PageSet:
    """The pages that could be read, packed."""
    return PageSet(
        numbers[found.readable].astype("<u8").tobytes(), found.digests[found.readable].astype("<u8").tobytes()
    )


def without_zero_pages(pages: PageSet) -> PageSet:
    """Drop all-zero pages: absent private memory reads as zeros, so both must compare equal."""
    digests = np.frombuffer(pages.digests, dtype="<u8")
    keep = digests != np.uint64(ZERO_PAGE_DIGEST)
    if keep.all():
        return pages
    numbers = np.frombuffer(pages.numbers, dtype="<u8")
    return PageSet(numbers[keep].tobytes(), digests[keep].tobytes())
