"""Many short requests of a tiny model while a hotfix lands every second, weights kept and changed in turns.

Every answer that one set of weights made alone must be the greedy text of these weights, so that a lost
token, a stale prefix or a mixed-up stream shows as a wrong text, not only as a failure.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter

from patchctl.demo.measure import quantile
from tests.benchmarks.context import Bench, Build
from tests.benchmarks.figures import Figure, Report
from tests.benchmarks.pair import Pair
from tests.benchmarks.short_requests import Answer, ShortRequests, plain_rate
from tests.benchmarks.tiny import make_tiny

_EVERY_S = 1.0
_PLAIN_S = 2.0
_US_MAX = 100.0


def run(bench: Bench) -> Report:
    """Until ``requests`` were answered or ``requests_s_max`` passed."""
    options = bench.options
    # Beside the present build, the next one has the same weights, then other ones, and so on.
    seeds = (1, 1, 2, 2)
    builds = [
        make_tiny(bench.folder / f"tiny-{number}", seed=seed, version=f"1.0.{number}")
        for number, seed in enumerate(seeds)
    ]
    seed_of = {build.digest: seed for build, seed in zip(builds, seeds, strict=True)}
    exchanges_us: list[float] = []
    with Pair(builds[0]) as pair:
        plain = [plain_rate(pair.url, _PLAIN_S)]
        with ShortRequests(pair.url, pair.model, options.requests) as clients:
            give_up = time.monotonic() + options.requests_s_max
            for build in itertools.cycle([*builds[1:], builds[0]]):
                if clients.wait(_EVERY_S) or time.monotonic() > give_up:
                    break
                exchanges_us.append(_hotfix(pair, build))
        plain.append(plain_rate(pair.url, _PLAIN_S))
        weights = {number: seed_of[build.digest] for number, build in pair.builds.items()}
    answers = clients.answers
    failures = Counter(answer.failure for answer in answers if answer.failure)
    checked, wrong = _check(answers, weights)
    span_s = (max(answer.ended_ns for answer in answers) - min(answer.began_ns for answer in answers)) / 1e9
    latencies = [(answer.ended_ns - answer.began_ns) / 1e6 for answer in answers]
    count = len(answers)
    return Report(
        [
            Figure("failed or aborted", failures.total(), "", "requests", count, at_most=0.0),
            Figure("texts not those of the weights", wrong, "", "texts checked", checked, at_most=0.0),
            Figure("answered", count, "requests", "asked for", options.requests),
            Figure("hotfixes meanwhile", len(exchanges_us), "", "seconds", span_s),
            Figure("answered per second", count / span_s, "requests/s", "GET /health alone", sum(plain) / len(plain)),
            Figure("request p99", quantile(latencies, 0.99), "ms", "p50", quantile(latencies, 0.5)),
            Figure("exchange p99", quantile(exchanges_us, 0.99), "µs", "100 µs", _US_MAX, at_most=1.0),
        ],
        {"failures": failures.most_common(5), "exchanges_us": exchanges_us},
    )


def _hotfix(pair: Pair, build: Build) -> float:
    """Stage, swap, release the old generation; returns the exchange in µs."""
    old = pair.active
    number, _ = pair.stage(build)
    swapped = pair.swap(number)
    pair.release(old)
    return float(swapped.data["exchange_us"])


def _check(answers: list[Answer], weights: dict[int, int]) -> tuple[int, int]:
    """Texts made by one set of weights alone, and how many of them differ from the usual one."""
    texts: dict[tuple[int, int], Counter[str]] = {}
    for answer in answers:
        seeds = {weights.get(number, 0) for number in answer.generations}
        if not answer.failure and len(seeds) == 1:
            texts.setdefault((answer.ask, seeds.pop()), Counter())[answer.text] += 1
    checked = sum(counter.total() for counter in texts.values())
    return checked, checked - sum(max(counter.values()) for counter in texts.values())
