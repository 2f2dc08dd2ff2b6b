"""Many exchanges of a tiny model in one process: enough of them for a 99th percentile that means something."""

from __future__ import annotations

import itertools
import random

from patchctl.demo.measure import quantile
from tests.benchmarks.context import Bench, Build
from tests.benchmarks.figures import Figure, Report
from tests.benchmarks.in_process import InProcessEngine
from tests.benchmarks.tiny import make_tiny

EXCHANGES = 300
_SEQUENCES = 4
_PROMPT_TOKENS = 8
_ANSWER_TOKENS = 96
_US_MAX = 100.0


def run(bench: Bench) -> Report:
    """Exchange back and forth between two resident generations while four sequences run."""
    base = make_tiny(bench.folder / "tiny-base", seed=1, version="1.0.0")
    same = make_tiny(bench.folder / "tiny-same", seed=1, version="1.0.1")
    changed = make_tiny(bench.folder / "tiny-changed", seed=2, version="1.0.2")
    figures: list[Figure] = []
    for kind, other in (("same weights", same), ("changed weights", changed)):
        bench.tell(f"exchange: {EXCHANGES} with {kind}")
        times_us, gaps_ms, steps_ms = _exchanges(base, other)
        figures += [
            Figure(f"{kind}: exchange p50 of {EXCHANGES}", quantile(times_us, 0.5), "µs", "100 µs", _US_MAX),
            Figure(f"{kind}: exchange p99", quantile(times_us, 0.99), "µs", "100 µs", _US_MAX, at_most=1.0),
            Figure(
                f"{kind}: step across an exchange, p99",
                quantile(gaps_ms, 0.99),
                "ms",
                "p99 of other steps",
                quantile(steps_ms, 0.99),
            ),
        ]
    return Report(figures)


def _exchanges(base: Build, other: Build) -> tuple[list[float], list[float], list[float]]:
    """Exchange times in µs; time between the tokens of two steps in ms, across an exchange and otherwise."""
    chance = random.Random(1)  # noqa: S311 - prompts, no secrets
    times_us: list[float] = []
    gaps_ms: list[float] = []
    steps_ms: list[float] = []
    with InProcessEngine(base) as engine:
        engine.stage(2, other)
        requests: list[int] = []
        while len(times_us) < EXCHANGES:
            if engine.ended(requests):
                _account(engine.steps(), gaps_ms, steps_ms)
                engine.forget()
                prompts = [[chance.randrange(3, 256) for _ in range(_PROMPT_TOKENS)] for _ in range(_SEQUENCES)]
                requests = [engine.submit(prompt, _ANSWER_TOKENS) for prompt in prompts]
                engine.wait_for_step()
            times_us.append(engine.swap(1 + (len(times_us) + 1) % 2)["exchange_us"])
    return times_us, gaps_ms, steps_ms


def _account(steps: list[tuple[int, bool]], gaps_ms: list[float], steps_ms: list[float]) -> None:
    for (earlier, _), (later, exchanged) in itertools.pairwise(steps):
        (gaps_ms if exchanged else steps_ms).append((later - earlier) / 1e6)
