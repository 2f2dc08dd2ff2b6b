"""The bytes of another process's tensors, read from outside while it serves."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator

import numpy as np

from snapshots.capture import kernel
from snapshots.capture.errors import AccessDeniedError, CaptureError, ProcessGoneError
from snapshots.capture.vmas import start_ticks
from snapshots.tensor_chunks import CHUNK_BYTES


class ContentReader:
    """Reads ranges of one process's memory, a chunk at a time. Not thread-safe: it has one buffer.

    Raises:
        ProcessGoneError: no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.start_ticks = start_ticks(pid)
        # Page-aligned: the kernel copies into a buffer that is off by 16 bytes at half the speed.
        self._memory = mmap.mmap(-1, CHUNK_BYTES)
        self._local = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self._remote = np.zeros(2, dtype=np.uint64)

    def read(self, address: int, size_bytes: int) -> Iterator[memoryview]:
        """Bytes of ``[address, address + size_bytes)``; each piece is valid until the next.

        Raises:
            ProcessGoneError: it ended, or its pid belongs to another process.
            AccessDeniedError: the kernel refused.
            CaptureError: the range is not mapped.
        """
        view = memoryview(self._memory)
        for begin in range(0, size_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size_bytes - begin)
            self._fill(address + begin, length)
            yield view[:length]
        if start_ticks(self.pid) != self.start_ticks:
            raise ProcessGoneError(self.pid, "its pid now belongs to another process")

    def _fill(self, address: int, length: int) -> None:
        self._remote[:] = address, length
        try:
            copied = kernel.process_vm_readv(self.pid, self._local, length, self._remote.ctypes.data, 1)
        except ProcessLookupError as error:
            raise ProcessGoneError(self.pid, "it ended while being read") from error
        except PermissionError as error:
            raise AccessDeniedError(self.pid, str(error)) from error
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise CaptureError(self.pid, str(error)) from error
            copied = 0
        if copied != length:
            raise CaptureError(self.pid, f"{length - copied} bytes at {address + copied:#x} are not mapped any more")
