"""How long the command line takes to start, and whether it ever imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from patchctl.agent.testing import make_kit
from patchctl.demo.measure import quantile
from tests.benchmarks.context import Bench
from tests.benchmarks.figures import Figure, Report

_ROUNDS_PER_ROUND = 2
_MS_MAX = 300.0
_COMMAND_S_MAX = 60.0


def run(bench: Bench) -> Report:
    """Commands in turns, ``status`` against a host with a tiny model."""
    kit = make_kit(bench.folder)
    environment = {**os.environ, "PATCHCTL_HOME": str(kit.home)}
    patchctl = [sys.executable, "-P", "-m", "patchctl"]
    commands = {
        "python -c pass": [sys.executable, "-P", "-c", "pass"],
        "patchctl --help": [*patchctl, "--help"],
        "patchctl status": [*patchctl, "status"],
    }
    with kit.host():
        times_ms = _times(commands, environment, _ROUNDS_PER_ROUND * bench.options.rounds)
        with_torch = sum(_imports_torch(argv, environment) for argv in commands.values())
    python_ms = quantile(times_ms["python -c pass"], 0.5)
    figures = [
        Figure(f"{name}, median", quantile(times_ms[name], 0.5), "ms", "0.3 s", _MS_MAX, at_most=1.0)
        for name in ("patchctl --help", "patchctl status")
    ]
    figures += [
        Figure(f"{name}, median", quantile(times_ms[name], 0.5), "ms", "python -c pass", python_ms)
        for name in ("patchctl --help", "patchctl status")
    ]
    figures.append(Figure("commands that import torch", with_torch, "", "commands", len(commands), at_most=0.0))
    return Report(figures, {"times_ms": times_ms})


def _times(commands: dict[str, list[str]], environment: dict[str, str], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, argv in commands.items():
            began = time.perf_counter()
            subprocess.run(argv, env=environment, capture_output=True, check=True, timeout=_COMMAND_S_MAX)
            times[name].append((time.perf_counter() - began) * 1e3)
    return times


def _imports_torch(argv: list[str], environment: dict[str, str]) -> bool:
    traced = {**environment, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(argv, env=traced, capture_output=True, text=True, check=True, timeout=_COMMAND_S_MAX)
    return any(line.rpartition("|")[2].strip() == "torch" for line in done.stderr.splitlines())
