"""What four streaming clients notice of a swap: stage, exchange and roll back in turns, weights kept or changed.

Every trial runs between two baseline windows of the same streams, and is compared with these two. A
swap's window begins with its request, so the steps that rebuild KV ahead of the exchange count as well.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from patchctl.demo.measure import quantile
from tests.benchmarks.context import Bench
from tests.benchmarks.core_wait import CoreWait
from tests.benchmarks.figures import Figure, Report
from tests.benchmarks.identity import Identity, compare
from tests.benchmarks.pair import Done, Pair
from tests.benchmarks.spans import Gap, Span, allowed_ms, inside
from tests.benchmarks.streams import Streams

STREAMS = 4
# The first tokens after an exchange arrive within a step or two; a slow machine's step takes 0.3 s.
TAIL_S = 1.0
_KINDS: tuple[Literal["same", "changed"], ...] = ("same", "changed")
_WORST_GAPS = 3
_EXCHANGE_US_MAX = 100.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One trip to another build and back, and the baseline beside it."""

    kind: Literal["same", "changed"]
    staged: Done
    swapped: Done
    rolled_back: Done
    released: Done
    beside: tuple[Span, Span]

    @property
    def away(self) -> Span:
        """While the other build may have made tokens."""
        return Span(self.swapped.span.begin_ns, self.rolled_back.span.end_ns)


def run(bench: Bench) -> Report:
    """Trials of both kinds in turns, ``rounds`` of each."""
    builds = bench.smollm2
    other = {"same": builds.same, "changed": builds.changed}
    trials: list[Trial] = []
    waits: dict[str, list[float]] = {"baseline": [], "staging": []}
    with Pair(builds.base) as pair, Streams(pair.url, pair.model, STREAMS) as streams:
        core = CoreWait(pair.pid("engine"))
        streams.warm()
        core.choose()
        before = streams.window(bench.options.window_s)
        waits["baseline"].append(core.lap())
        for turn, kind in itertools.product(range(bench.options.rounds), _KINDS):
            bench.tell(f"swap: round {turn + 1}, {kind} weights")
            core.lap()
            number, staged = pair.stage(other[kind])
            waits["staging"].append(core.lap())
            time.sleep(TAIL_S)
            swapped = pair.swap(number)
            time.sleep(TAIL_S)
            rolled_back = pair.swap(1)
            time.sleep(TAIL_S)
            released = pair.release(number)
            core.lap()
            after = streams.window(bench.options.window_s)
            waits["baseline"].append(core.lap())
            trials.append(Trial(kind, staged, swapped, rolled_back, released, (before, after)))
            before = after
        same = [trial.away for trial in trials if trial.kind == "same"]
        changed = [trial.away for trial in trials if trial.kind == "changed"]
        streams.wait(lambda responses: compare(responses, same, changed).complete)
    gaps = streams.gaps
    figures = [figure for kind in _KINDS for figure in _gap_figures(kind, trials, gaps)]
    figures += [
        *_exchange_figures(trials),
        _wait_figure(waits),
        Figure("failed or aborted", len(streams.failures), "", "responses", len(streams.responses), at_most=0.0),
        _identity_figure(compare(streams.responses, same, changed)),
    ]
    return Report(
        figures,
        {"trials": [_describe(trial, gaps) for trial in trials], "core_wait": waits, "failures": streams.failures[:5]},
    )


def _gap_figures(kind: str, trials: Sequence[Trial], gaps: Sequence[Gap]) -> list[Figure]:
    mine = [trial for trial in trials if trial.kind == kind]
    baseline = inside(gaps, *(span for trial in mine for span in trial.beside))
    staging = inside(gaps, *(trial.staged.span for trial in mine))
    allowed = [allowed_ms(inside(gaps, *trial.beside)) for trial in mine]
    swap = [_largest(gaps, trial.swapped) for trial in mine]
    back = [_largest(gaps, trial.rolled_back) for trial in mine]
    worst = max(range(len(mine)), key=lambda index: swap[index] / allowed[index])
    of = f"{kind} weights"
    return [
        Figure(
            f"{of}: largest gap at the swap, median round",
            quantile(swap, 0.5),
            "ms",
            "max(p99, 2 p50) beside",
            quantile(allowed, 0.5),
            at_most=1.0,
        ),
        Figure(
            f"{of}: the same, worst round",
            swap[worst],
            "ms",
            "max(p99, 2 p50) beside",
            allowed[worst],
            at_most=1.0,
        ),
        Figure(
            f"{of}: largest gap at the rollback, median",
            quantile(back, 0.5),
            "ms",
            "the swap's",
            quantile(swap, 0.5),
            at_most=1.0,
        ),
        Figure(
            f"{of}: step p99 while staging",
            quantile(staging, 0.99),
            "ms",
            "p99 beside",
            quantile(baseline, 0.99),
            at_most=1.3,
        ),
        Figure(f"{of}: step p50 while staging", quantile(staging, 0.5), "ms", "p50 beside", quantile(baseline, 0.5)),
        Figure(f"{of}: largest gap while staging", max(staging), "ms", "max(p99, 2 p50) beside", allowed_ms(baseline)),
    ]


def _exchange_figures(trials: Sequence[Trial]) -> list[Figure]:
    times = [done.data["exchange_us"] for trial in trials for done in (trial.swapped, trial.rolled_back)]
    name = f"exchange, worst of {len(times)}"
    return [Figure(name, max(times), "µs", "100 µs", _EXCHANGE_US_MAX, at_most=1.0)]


def _wait_figure(waits: dict[str, list[float]]) -> Figure:
    """More than a few percent in the baseline: the machine was busy with something else."""
    staging, baseline = (100 * quantile(waits[phase], 0.5) for phase in ("staging", "baseline"))
    return Figure("serve loop waits for a core while staging", staging, "%", "% in the baseline", baseline)


def _identity_figure(identity: Identity) -> Figure:
    return Figure(
        "texts that crossed a same-weights swap, as unswapped",
        identity.equal,
        "",
        "such texts",
        identity.compared,
        at_least=1.0,
    )


def _largest(gaps: Sequence[Gap], done: Done) -> float:
    return max(inside(gaps, done.span.plus(TAIL_S)), default=float("nan"))


def _describe(trial: Trial, gaps: Sequence[Gap]) -> dict[str, Any]:
    """One trial for ``bench.json``, with when in staging its worst gaps ended."""
    baseline = inside(gaps, *trial.beside)
    begin_ns, end_ns = trial.staged.span.begin_ns, trial.staged.span.end_ns
    staging = sorted((gap for gap in gaps if begin_ns <= gap.at_ns <= end_ns), key=lambda gap: -gap.ms)
    return {
        "kind": trial.kind,
        "baseline_p50_ms": quantile(baseline, 0.5),
        "baseline_p99_ms": quantile(baseline, 0.99),
        "stage_ms": trial.staged.span.ms,
        "stage": {key: value for key, value in trial.staged.data.items() if isinstance(value, (int, float, str))},
        "worst_while_staging": [{"ms": gap.ms, "at_ms": (gap.at_ns - begin_ns) / 1e6} for gap in staging[:_WORST_GAPS]],
        "swap_ms": trial.swapped.span.ms,
        "swap": trial.swapped.data,
        "swap_gap_ms": _largest(gaps, trial.swapped),
        "rollback_ms": trial.rolled_back.span.ms,
        "rollback": trial.rolled_back.data,
        "rollback_gap_ms": _largest(gaps, trial.rolled_back),
        "release_gap_ms": _largest(gaps, trial.released),
    }
