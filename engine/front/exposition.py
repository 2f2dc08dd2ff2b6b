"""The page of /metrics, in Prometheus' text format 0.0.4.

Names are vLLM's with the prefix ``patchctl_`` for its ``vllm:``, so a dashboard is ported by replacing that, and
with the same meaning and units. Ours alone are ``swaps_total``, ``engine_up``, ``engine_restarts_total``,
``engine_steps_total``, ``generation_info``, ``request_failure_total`` and ``request_rejected_total``.
A request with several choices counts once in ``request_*`` and ``e2e_*``; each choice counts in the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from engine.front.histogram import Histogram
from engine.front.metrics import Metrics

_PREFIX = "patchctl_"


@dataclass(frozen=True, slots=True)
class Now:
    """What is read at the time of the page.

    Attributes:
        running: choices the engine has begun.
        waiting: choices it has not.
        engine_up: the engine can be reached.
        generations: number, build digest and whether it serves, of each resident generation.
    """

    running: int
    waiting: int
    engine_up: bool
    generations: tuple[tuple[int, str, bool], ...]


def render_page(metrics: Metrics, now: Now) -> str:
    """All families."""
    return "".join(f"{line}\n" for family in _families(metrics, now) for line in family)


def _families(metrics: Metrics, now: Now) -> Iterator[Iterable[str]]:
    engine = metrics.engine
    yield _gauge("num_requests_running", "Choices the engine has begun.", now.running)
    yield _gauge("num_requests_waiting", "Choices waiting for the engine.", now.waiting)
    yield _gauge("kv_cache_usage_perc", "KV blocks in use; 1 means 100 percent.", engine.kv_usage)
    queries, hits = engine.total("prefix_query_tokens"), engine.total("prefix_hit_tokens")
    yield _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", queries)
    yield _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", hits)
    yield _counter("num_preemptions_total", "Sequences put back for want of KV blocks.", engine.total("preemptions"))
    yield _counter("engine_steps_total", "Steps of the engine.", engine.total("steps"))
    yield _counter("prompt_tokens_total", "Prompt tokens submitted.", metrics.prompt_tokens)
    yield _counter("generation_tokens_total", "Tokens generated.", metrics.tokens_out)
    finishes, failures = _by("finished_reason", metrics.finishes), _by("reason", metrics.failures | metrics.departures)
    yield _counter("request_success_total", "Responses completed.", finishes)
    yield _counter("request_failure_total", "Responses that ended before they were complete.", failures)
    refused = _by("reason", metrics.refusals)
    yield _counter("request_rejected_total", "Requests answered with an error before the engine saw them.", refused)
    yield _histogram("time_to_first_token_seconds", "Arrival of a request to a choice's first token.", metrics.ttft)
    yield _histogram("inter_token_latency_seconds", "Between two tokens of a choice.", metrics.inter_token)
    yield _histogram("e2e_request_latency_seconds", "Arrival of a request to its completed response.", metrics.latency)
    yield _histogram("request_queue_time_seconds", "Submission of a choice until it was begun.", metrics.queue_time)
    yield _histogram("request_prompt_tokens", "Prompt tokens of a completed response.", metrics.request_prompt_tokens)
    generated = metrics.request_generation_tokens
    yield _histogram("request_generation_tokens", "Tokens generated for a completed response.", generated)
    yield _counter("swaps_total", "Generation exchanges the engine reported.", metrics.swaps)
    yield _gauge("engine_up", "1 while the engine can be reached.", int(now.engine_up))
    yield _counter("engine_restarts_total", "Engines attached after the first.", metrics.engine_restarts)
    resident = {
        f'{{generation="{number}",build="{build}",active="{str(active).lower()}"}}': 1
        for number, build, active in now.generations
    }
    yield _family("generation_info", "gauge", "Resident generations.", resident)


def _by(label: str, counts: Mapping[str, int]) -> dict[str, float]:
    return {f'{{{label}="{value}"}}': count for value, count in counts.items()}


def _gauge(name: str, text: str, value: float) -> Iterator[str]:
    return _family(name, "gauge", text, {"": value})


def _counter(name: str, text: str, value: float | Mapping[str, float]) -> Iterator[str]:
    return _family(name, "counter", text, value if isinstance(value, Mapping) else {"": value})


def _family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {text}"
    yield f"# TYPE {_PREFIX}{name} {kind}"
    for labels, value in samples.items():
        yield f"{_PREFIX}{name}{labels} {value}"


def _histogram(name: str, text: str, histogram: Histogram) -> Iterator[str]:
    bounds = (*map(str, histogram.bounds), "+Inf")
    buckets = zip(bounds, histogram.cumulative(), strict=True)
    samples: dict[str, float] = {f'_bucket{{le="{bound}"}}': count for bound, count in buckets}
    return _family(name, "histogram", text, samples | {"_sum": histogram.total, "_count": histogram.count})
