"""What armed write tracking costs a process that serves: CPU time of the same work, armed and not."""

from __future__ import annotations

import subprocess
import sys

from patchctl.demo.measure import quantile
from snapshots.capture.pages import WriteTracker
from snapshots.capture.probe import probe
from snapshots.capture.process import capture_process

# A stand-in for serving: weights that are read, a cache that is appended to, requests that are parsed and answered.
# Prints the CPU time of each block of work.
_SERVER = """
import json, sys, time
import numpy as np
from snapshots.capture.uffd import arm_self
weights, x = np.ones((4096, 2048), np.float32), np.ones(2048, np.float32)
cache = np.zeros(64 << 20, np.uint8)
request = json.dumps({"messages": [{"role": "user", "content": "word " * 200}] * 10})
if sys.argv[1] == "armed": assert arm_self().armed
at = 0
for line in sys.stdin:
    began = time.process_time()
    for token in range(64):
        weights @ x
        cache[at : at + 65536] = token
        at = (at + 65536) % len(cache)
        if token % 8 == 0: json.dumps(json.loads(request))
    print(time.process_time() - began, flush=True)
"""


def measure_overhead(rounds: int) -> dict[str, float] | None:
    """CPU milliseconds of a block of work, medians: plain, and armed with a capture after every block.

    None where the kernel has no write tracking.
    """
    if not probe().write_tracking.available:
        return None
    servers = {
        arm: subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVER, arm], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for arm in ("plain", "armed")
    }
    spent: dict[str, list[float]] = {arm: [] for arm in servers}
    try:
        for server in servers.values():
            _work(server)
        with WriteTracker(servers["armed"].pid) as tracker:
            for _ in range(rounds):
                for arm, server in servers.items():
                    spent[arm].append(_work(server))
                capture_process(servers["armed"].pid, "engine", tracker=tracker)
    finally:
        for server in servers.values():
            server.kill()
            server.communicate()
    return {f"{arm}_ms": 1e3 * quantile(values, 0.5) for arm, values in spent.items()}


def _work(server: subprocess.Popen[str]) -> float:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("go\n")
    server.stdin.flush()
    return float(server.stdout.readline())
