"""Hash named tensors, against reading the same bytes: one thread, two threads, and CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from patchctl.demo.measure import quantile
from snapshots.capture.state import hash_tensors

_Bytes = npt.NDArray[np.uint8]
# Layers of 4 MiB beside one embedding of an eighth: the spread of a real state dict.
_LAYER_BYTES = 4 << 20
_MIB = 1 << 20


def measure_state(mib: int, rounds: int) -> dict[str, float]:
    """Speeds in GB/s, the best of ``rounds``; CPU times in ms, medians. Arms take turns."""
    tensors = _tensors(mib * _MIB)
    total = sum(data.nbytes for data in tensors.values())
    arms: dict[str, tuple[Callable[[], float], Callable[[], object]]] = {
        "read_cpu": (time.process_time, lambda: _read(tensors, 1)),
        "hash_cpu": (time.process_time, lambda: hash_tensors(tensors)),
        "read_1": (time.perf_counter, lambda: _read(tensors, 1)),
        "hash_1": (time.perf_counter, lambda: hash_tensors(tensors)),
        "read_2": (time.perf_counter, lambda: _read(tensors, 2)),
        "hash_2": (time.perf_counter, lambda: hash_tensors(tensors, threads_max=2)),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (clock, work) in arms.items():
            began = clock()
            work()
            times[name].append((clock() - began) * 1e3)
    speeds = {f"{name}_gb_s": total / min(times[name]) / 1e6 for name in ("read_1", "hash_1", "read_2", "hash_2")}
    return speeds | {f"{name}_ms": quantile(times[name], 0.5) for name in ("read_cpu", "hash_cpu")}


def _tensors(total: int) -> dict[str, _Bytes]:
    block = np.random.default_rng(1).integers(0, 2**63, _MIB // 8, dtype=np.int64).view(np.uint8)
    sizes = [total // 8] + [_LAYER_BYTES] * ((total - total // 8) // _LAYER_BYTES)
    return {f"t{number}": np.tile(block, size // _MIB) for number, size in enumerate(sizes)}


def _read(tensors: dict[str, _Bytes], threads: int) -> None:
    """Xor over 64-bit words: one pass at memory speed; numpy lets other threads run meanwhile."""
    pieces = [
        data[at : at + _LAYER_BYTES].view(np.uint64)
        for data in tensors.values()
        for at in range(0, len(data), _LAYER_BYTES)
    ]
    if threads == 1:
        for piece in pieces:
            np.bitwise_xor.reduce(piece)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.bitwise_xor.reduce, pieces))
