"""Snapshot figures against the limits of the same machine in the same run; prints JSON on stdout.

Usage: ``python tests/benchmarks/bench_snapshots.py [--gib 1] [--dirty 0.01] [--rounds 100] [--state-mib 512]``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from snapshots.capture.pages import PageReader, WriteTracker
from snapshots.capture.probe import probe
from snapshots.capture.process import capture_process, sample_memory
from snapshots.capture.state import digest_tensors
from snapshots.model import PAGE_BYTES

# Holds `gib` of resident memory, then rewrites one byte of each page it is told to.
_TARGET = """
import mmap, random, sys
from snapshots.capture.uffd import arm_self
size, dirty = int(float(sys.argv[1]) * 2**30), float(sys.argv[2])
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, size, 4096): memory[at] = 1
import ctypes
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print(base, size, arm_self().arm_ms, flush=True)
rng = random.Random(1)
for line in sys.stdin:
    picked = rng.sample(range(size // 4096), int(size // 4096 * dirty))
    for page in picked: memory[page * 4096] = (memory[page * 4096] + 1) % 256
    print(len(picked), flush=True)
"""

# Room for one round's written pages (up to 25 % of 1 GiB) and far larger than the caches.
_COPY_BYTES = 256 << 20
_Bytes = npt.NDArray[np.uint8]


def timed_ms(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    begun = time.perf_counter()
    function()
    return (time.perf_counter() - begun) * 1e3


def cpu_ms(function: Callable[[], object]) -> float:
    """CPU time of one call, all threads: what a busy machine distorts least."""
    begun = time.process_time()
    function()
    return (time.process_time() - begun) * 1e3


def percentile(times_ms: list[float], share: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(times_ms)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3)


def copy_ms(source: _Bytes, target: _Bytes, size: int, turn: int) -> float:
    """Wall time to copy ``size`` bytes, another part at every turn, so that they come from memory."""
    at = turn * size % (len(source) - size)
    begun = time.perf_counter()
    np.copyto(target[at : at + size], source[at : at + size])
    return (time.perf_counter() - begun) * 1e3


def bench_tracked(gib: float, dirty: float, rounds: int) -> dict[str, object]:
    """Scan, re-arm, read and hash the written pages of another process."""
    feature = probe().write_tracking
    if not feature.available:
        return {"skipped": feature.detail}
    command = [sys.executable, "-P", "-c", _TARGET, str(gib), str(dirty)]
    target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert target.stdin is not None
    assert target.stdout is not None
    try:
        base, size, arm_ms = target.stdout.readline().split()
        start, end = int(base), int(base) + int(size)
        reader = PageReader(target.pid)
        times: list[float] = []
        cpu_times: list[float] = []
        scans: list[float] = []
        copies: list[float] = []
        source, target_copy = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
        with WriteTracker(target.pid) as tracker:
            tracker.written(start, end)
            for _ in range(rounds):
                target.stdin.write("dirty\n")
                target.stdin.flush()
                planted = int(target.stdout.readline())
                begun, begun_cpu = time.perf_counter(), time.process_time()
                numbers = tracker.written(start, end)
                scanned = time.perf_counter()
                assert numbers is not None
                pages, unread = reader.digest(numbers)
                times.append((time.perf_counter() - begun) * 1e3)
                cpu_times.append((time.process_time() - begun_cpu) * 1e3)
                scans.append((scanned - begun) * 1e3)
                assert (len(pages), unread) == (planted, 0)
                copies.append(copy_ms(source, target_copy, planted * PAGE_BYTES, len(copies)))
            capture_ms = [timed_ms(lambda: capture_process(target.pid, "engine", tracker=tracker)) for _ in range(5)]
        full_ms = timed_ms(lambda: capture_process(target.pid, "engine"))
        sample_ms = [timed_ms(lambda: sample_memory(target.pid, requests_completed=0, tokens=0)) for _ in range(9)]
    finally:
        target.kill()
        target.communicate()
    dirty_bytes = planted * PAGE_BYTES
    return {
        "gib": gib,
        "dirty_percent": dirty * 100,
        "rounds": rounds,
        "arm_ms": round(float(arm_ms), 3),
        "scan_p50_ms": percentile(scans, 0.5),
        "scan_read_hash_min_ms": percentile(times, 0),
        "scan_read_hash_p50_ms": percentile(times, 0.5),
        "scan_read_hash_p99_ms": percentile(times, 0.99),
        "scan_read_hash_cpu_p50_ms": percentile(cpu_times, 0.5),
        "scan_read_hash_cpu_p99_ms": percentile(cpu_times, 0.99),
        "memcpy_of_dirty_bytes_p50_ms": percentile(copies, 0.5),
        "memcpy_limit_gb_s": round(dirty_bytes / percentile(copies, 0) / 1e6, 2),
        "share_of_memcpy_limit_p50": round(percentile(copies, 0.5) / percentile(times, 0.5), 3),
        "capture_process_clean_p50_ms": percentile(capture_ms, 0.5),
        "capture_process_full_hash_ms": round(full_ms, 1),
        "sample_memory_p50_ms": percentile(sample_ms, 0.5),
    }


def bench_state(mib: int, rounds: int) -> dict[str, object]:
    """Hash named tensors, against reading the same bytes (xor over u64), both on one thread and on two."""
    total = mib << 20
    rng = np.random.default_rng(1)
    block = rng.integers(0, 2**63, (1 << 20) // 8, dtype=np.int64).view(np.uint8)
    # One embedding of an eighth, and layers of 4 MiB: the spread of a real state dict.
    sizes = [total // 8] + [4 << 20] * ((total - total // 8) // (4 << 20))
    tensors = {f"t{n}": np.tile(block, size >> 20) for n, size in enumerate(sizes)}
    total = sum(sizes)

    def read(arrays: list[_Bytes]) -> None:
        for data in arrays:
            np.bitwise_xor.reduce(data.view(np.uint64))

    ordered = list(tensors.values())
    times: dict[str, list[float]] = {"read": [], "hash_1": [], "hash_2": [], "read_cpu": [], "hash_cpu": []}
    for _ in range(rounds):  # interleaved, so that a noisy neighbour meets all of them
        times["read_cpu"].append(cpu_ms(lambda: read(ordered)))
        times["hash_cpu"].append(cpu_ms(lambda: digest_tensors(tensors)))
        times["read"].append(timed_ms(lambda: read(ordered)))
        times["hash_1"].append(timed_ms(lambda: digest_tensors(tensors)))
        times["hash_2"].append(timed_ms(lambda: digest_tensors(tensors, threads_max=2)))
    rate = {name: total / min(found) / 1e6 for name, found in times.items()}
    return {
        "mib": total >> 20,
        "tensors": len(tensors),
        "read_limit_gb_s": round(rate["read"], 2),
        "hash_one_thread_gb_s": round(rate["hash_1"], 2),
        "hash_two_threads_gb_s": round(rate["hash_2"], 2),
        "hash_one_thread_p50_ms": percentile(times["hash_1"], 0.5),
        "hash_two_threads_p50_ms": percentile(times["hash_2"], 0.5),
        "one_thread_share_of_read_limit": round(rate["hash_1"] / rate["read"], 3),
        "one_thread_share_of_read_limit_cpu": round(rate["hash_cpu"] / rate["read_cpu"], 3),
        "two_threads_share_of_read_limit": round(rate["hash_2"] / rate["read"], 3),
    }


def main() -> None:
    """Run both and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--dirty", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--state-mib", type=int, default=512)
    options = parser.parse_args()
    print(
        json.dumps(
            {
                "tracked_diff": bench_tracked(options.gib, options.dirty, options.rounds),
                "state_hash": bench_state(options.state_mib, 9),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
