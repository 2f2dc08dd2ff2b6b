"""Resident memory of the engine process over many changed-weights hotfixes: each one's peak, and what it leaves.

A hotfix is stage, swap, release of the old generation. Each settled figure is the lowest of ten
samples, so that buffers of a step under way do not count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from patchctl.demo.measure import quantile
from tests.benchmarks.context import Bench
from tests.benchmarks.figures import Figure, Report
from tests.benchmarks.pair import Pair
from tests.benchmarks.residency import Sample, Watch
from tests.benchmarks.spans import Span
from tests.benchmarks.streams import ASKS, Streams

_STREAMS = 1
_SETTLE_S = 0.5
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Swap:
    """Bytes of one hotfix: before, highest, with both generations resident and idle, after."""

    before: int
    peak: int
    peak_anonymous: int
    both: int
    after: int


def run(bench: Bench) -> Report:
    """Change weights to and fro ``swaps`` times beside one stream."""
    builds = bench.smollm2
    turns = itertools.cycle((builds.changed, builds.base))
    swaps: list[_Swap] = []
    with (
        Pair(builds.base) as pair,
        Watch(pair.pid("engine")) as engine,
        Watch(pair.pid("front")) as front,
        Streams(pair.url, pair.model, _STREAMS) as streams,
    ):
        # Every ask was answered once: KV blocks and cached prefixes are as many as they will ever be.
        streams.wait(lambda responses: sum(response.ended for response in responses) >= len(ASKS))
        for turn in range(bench.options.swaps):
            bench.tell(f"memory: swap {turn + 1} of {bench.options.swaps}")
            before = _settled(engine)
            old = pair.active
            number, staged = pair.stage(next(turns))
            both = _settled(engine)
            pair.swap(number)
            released = pair.release(old)
            under_way = engine.inside(Span(staged.span.begin_ns, released.span.end_ns))
            swaps.append(
                _Swap(
                    before=before.resident,
                    peak=max(taken.resident for taken in under_way),
                    peak_anonymous=max(taken.anonymous for taken in under_way),
                    both=both.resident,
                    after=_settled(engine).resident,
                )
            )
        weights = builds.base.weight_bytes
        front_rss = [taken.resident for taken in front.samples]
        failures = streams.failures
    return Report(
        _figures(swaps, weights, front_rss, len(failures), len(streams.responses)),
        {"weight_bytes": weights, "swaps": [asdict(swap) for swap in swaps], "failures": failures[:5]},
    )


def _settled(watch: Watch) -> Sample:
    """The lowest sample of half a second."""
    began = time.monotonic_ns()
    time.sleep(_SETTLE_S)
    return min(watch.inside(Span(began, time.monotonic_ns())), key=lambda taken: taken.resident)


def _figures(
    swaps: Sequence[_Swap], weights: int, front_rss: Sequence[int], failures: int, responses: int
) -> list[Figure]:
    extra = [swap.peak - swap.before for swap in swaps]
    graphs = [max(swap.both - swap.before - weights, 0) for swap in swaps]
    worst = max(range(len(swaps)), key=lambda index: extra[index] / (weights + graphs[index]))
    first = swaps[0].before
    left = max(swap.after for swap in swaps)
    return [
        Figure(
            "engine RSS: extra at the peak, worst hotfix",
            extra[worst] / _MIB,
            "MiB",
            "weights + graphs",
            (weights + graphs[worst]) / _MIB,
            at_most=1.05,
        ),
        Figure(
            "engine RSS: graphs and buffers, settled (median)",
            quantile(graphs, 0.5) / _MIB,
            "MiB",
            "weights",
            weights / _MIB,
        ),
        Figure(
            "engine anonymous memory at the peak",
            max(swap.peak_anonymous for swap in swaps) / _MIB,
            "MiB",
            "RSS before",
            first / _MIB,
        ),
        Figure(
            f"engine RSS after a hotfix, highest of {len(swaps)}",
            left / _MIB,
            "MiB",
            "before the first",
            first / _MIB,
            at_most=1.01,
        ),
        Figure(
            "engine RSS after the last hotfix",
            swaps[-1].after / _MIB,
            "MiB",
            "after the first",
            swaps[0].after / _MIB,
        ),
        Figure("front RSS at the end", front_rss[-1] / _MIB, "MiB", "its lowest", min(front_rss) / _MIB),
        Figure("failed or aborted", failures, "", "responses", responses, at_most=0.0),
    ]
