"""What this machine can do with as many bytes: copy, compare and read them, from memory and not from a cache."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
# Far larger than the caches, and room for 3 % of 4 GiB beside the part that was used last.
_BUFFER_BYTES = 512 << 20

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def elapsed_ms(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    function()
    return (time.perf_counter() - began) * 1e3


class MemoryLimits:
    """Two equal buffers; every call takes another part of them."""

    def __init__(self) -> None:
        self._source, self._goal = np.ones(_BUFFER_BYTES, np.uint8), np.ones(_BUFFER_BYTES, np.uint8)
        self._at = 0

    def measure_ms(self, size: int) -> dict[str, float]:
        """Wall time of each kind over ``size`` bytes, by one thread."""
        kinds: dict[str, Callable[[_Bytes, _Bytes], object]] = {
            "memcpy": lambda source, goal: np.copyto(goal, source),
            "memcmp": lambda source, goal: _libc.memcmp(source.ctypes.data, goal.ctypes.data, size),
            "read": lambda source, _goal: np.bitwise_xor.reduce(source.view(np.uint64)),
        }
        return {name: self._one_ms(kind, size) for name, kind in kinds.items()}

    def _one_ms(self, kind: Callable[[_Bytes, _Bytes], object], size: int) -> float:
        if self._at + size > _BUFFER_BYTES:
            self._at = 0
        part = slice(self._at, self._at + size)
        self._at += size
        return elapsed_ms(lambda: kind(self._source[part], self._goal[part]))
