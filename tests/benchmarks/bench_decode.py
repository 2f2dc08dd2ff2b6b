"""Decode speed of our engine against transformers' ``generate``: same folder, prompts, threads, and run.

A rate counts the tokens made while every sequence of the batch decodes, so neither side's prefill is in
it; the time of the whole call is reported beside it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from patchctl.demo.measure import quantile
from tests.benchmarks.arms import Arm
from tests.benchmarks.context import Bench
from tests.benchmarks.figures import Figure, Report
from tests.benchmarks.pair import Pair
from tests.benchmarks.spans import decode_rate
from tests.benchmarks.streams import ASKS, Ask, Streams

_BATCHES = (1, 4)
_PROMPT_TOKENS = 32
_TOKENS = 32


@dataclass
class _Arm:
    """One arm and batch size: tokens per second, of decoding and of the whole call, and CPU time, each round."""

    decode: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def add(self, began_ns: int, arrivals: Sequence[Sequence[int]], cpu_ms: float | None = None) -> None:
        self.cpu_ms += [] if cpu_ms is None else [cpu_ms]
        self.decode.append(decode_rate(arrivals))
        last_ns = max(times[-1] for times in arrivals)
        self.call.append(sum(map(len, arrivals)) / ((last_ns - began_ns) / 1e9))


def run(bench: Bench) -> Report:
    """Every round asks every arm for every batch size; the order turns."""
    build = bench.smollm2.base
    folder = str(build.folder)
    chance = random.Random(1)  # noqa: S311 - prompts, no secrets
    vocabulary = build.manifest.model["vocab_size"]
    arms = {(name, batch): _Arm() for name in ("engine", "transformers", "http") for batch in _BATCHES}
    limits_ms: dict[int, list[float]] = {batch: [] for batch in _BATCHES}
    with ExitStack() as stack:
        ours = stack.enter_context(Arm("arm_engine", folder))
        theirs = stack.enter_context(Arm("arm_transformers", folder))
        linears = stack.enter_context(Arm("arm_linears", folder))
        pair = stack.enter_context(Pair(build))
        for turn in range(bench.options.rounds + 1):
            bench.tell(f"decode: round {turn} of {bench.options.rounds}" + ("" if turn else ", to warm up"))
            for batch in _BATCHES:
                # New prompts every round, so that no prefix cache answers for the model.
                prompts = [[chance.randrange(vocabulary) for _ in range(_PROMPT_TOKENS)] for _ in range(batch)]
                asked = [("engine", ours), ("transformers", theirs)]
                for name, arm in asked if turn % 2 else reversed(asked):
                    answer = arm.ask(prompts=prompts, tokens=_TOKENS)
                    if turn:
                        arms[name, batch].add(answer["began_ns"], answer["arrivals_ns"], answer["cpu_ms"])
                limit_ms = linears.ask(rows=batch)["ms"]
                began_ns, arrivals = _over_http(pair, batch)
                if turn:
                    limits_ms[batch].append(limit_ms)
                    arms["http", batch].add(began_ns, arrivals)
    return Report(_figures(arms, limits_ms), {"arms": _data(arms), "linears_ms": limits_ms})


def _over_http(pair: Pair, batch: int) -> tuple[int, list[list[int]]]:
    """One streamed answer per client, all asked at once."""
    asks = [Ask(ask.prompt, _TOKENS) for ask in ASKS]
    began_ns = time.monotonic_ns()
    with Streams(pair.url, pair.model, batch, asks, turns=1) as streams:
        streams.wait(lambda responses: sum(response.ended for response in responses) == batch)
    if streams.failures:
        raise RuntimeError(streams.failures[0])
    return began_ns, [response.arrivals_ns for response in streams.responses]


def _figures(arms: dict[tuple[str, int], _Arm], limits_ms: dict[int, list[float]]) -> list[Figure]:
    decode = {key: quantile(arm.decode, 0.5) for key, arm in arms.items()}
    call = {key: quantile(arm.call, 0.5) for key, arm in arms.items()}
    cpu_ms = {key: quantile(arm.cpu_ms, 0.5) for key, arm in arms.items()}
    figures = []
    for batch in _BATCHES:
        ours, theirs, http = ("engine", batch), ("transformers", batch), ("http", batch)
        limit = batch * 1e3 / quantile(limits_ms[batch], 0.5)
        figures += [
            Figure(f"decode, batch {batch}", decode[ours], "tok/s", "transformers", decode[theirs], at_least=0.9),
            Figure(f"whole call, batch {batch}", call[ours], "tok/s", "transformers", call[theirs]),
            # What a busy machine distorts least; less is better.
            Figure(f"CPU of a whole call, batch {batch}", cpu_ms[ours], "ms", "transformers", cpu_ms[theirs]),
            Figure(f"decode, batch {batch}", decode[ours], "tok/s", "linears alone", limit),
            Figure(f"decode through HTTP, batch {batch}", decode[http], "tok/s", "in process", decode[ours]),
        ]
    one, four = decode["engine", 1], decode["engine", 4]
    return [*figures, Figure("decode, batch 4", four, "tok/s", "batch 1", one, at_least=2.2)]


def _data(arms: dict[tuple[str, int], _Arm]) -> dict[str, Any]:
    return {f"{name} {batch}": asdict(arm) for (name, batch), arm in arms.items()}
