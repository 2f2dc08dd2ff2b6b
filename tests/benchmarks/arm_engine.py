"""Arm: our engine in process, serve loop and all, on a build folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from engine.build import read_manifest
from tests.benchmarks.arms import answer_with
from tests.benchmarks.context import Build
from tests.benchmarks.in_process import InProcessEngine


def main() -> None:
    """Answer with the arrivals of each token, and the CPU time of the whole call."""
    folder = Path(sys.argv[1])
    with InProcessEngine(Build(folder, read_manifest(folder))) as engine:

        def volley(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
            began_cpu_s = time.process_time()
            began_ns, arrivals = engine.volley(prompts, tokens)
            cpu_ms = (time.process_time() - began_cpu_s) * 1e3
            return {"began_ns": began_ns, "arrivals_ns": arrivals, "cpu_ms": cpu_ms}

        answer_with(volley)


if __name__ == "__main__":
    main()
