"""The page of /metrics: it parses strictly, has the field's names, and its numbers are those counted."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from engine.front.exposition import Now, render_page
from engine.front.metrics import Departure, Failure, Finish, Metrics, Outcome
from engine.wire import Load

NOW = Now(running=2, waiting=3, engine_up=True, generations=((1, "sha256:aa", False), (2, "sha256:bb", True)))
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf'({NAME})(?:\{{((?:[a-zA-Z_]\w*="[^"\\\n]*",?)*)\}})? (\S+)\Z')
Family = tuple[str, dict[str, float]]


def parse(page: str) -> dict[str, Family]:
    """A strict reader of the text format 0.0.4: HELP, TYPE, then that family's samples only."""
    assert page.endswith("\n")
    families: dict[str, Family] = {}
    name = ""
    helped: set[str] = set()
    for line in page[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, text = line[7:].split(" ", 1)
            assert name not in helped, f"{name} comes twice"
            assert text
            helped.add(name)
        elif line.startswith("# TYPE "):
            typed, kind = line[7:].split(" ")
            assert (typed, kind in {"counter", "gauge", "histogram"}) == (name, True)
            assert (kind == "counter") == name.endswith("_total")
            families[name] = (kind, {})
        else:
            match = SAMPLE.match(line)
            assert match is not None, line
            sample, labels, value = match.groups()
            kind, samples = families[name]
            suffix = sample.removeprefix(name)
            assert suffix in ({"_bucket", "_sum", "_count"} if kind == "histogram" else {""}), line
            key = suffix + (f"{{{labels}}}" if labels else "")
            assert key not in samples, f"{line} comes twice"
            samples[key] = float(value)
    for name, (kind, samples) in families.items():
        if kind == "histogram":
            buckets = [value for key, value in samples.items() if key.startswith("_bucket")]
            bounds = [key[len('_bucket{le="') : -2] for key in samples if key.startswith("_bucket")]
            assert buckets == sorted(buckets), name
            assert [float(bound) for bound in bounds] == sorted(float(bound) for bound in bounds)
            assert (bounds[-1], buckets[-1]) == ("+Inf", samples["_count"])
            assert "_sum" in samples
    return families


def test_names_are_the_fields() -> None:
    families = parse(render_page(Metrics(), NOW))
    vllm = {
        "num_requests_running": "gauge",
        "num_requests_waiting": "gauge",
        "kv_cache_usage_perc": "gauge",
        "prefix_cache_queries_total": "counter",
        "prefix_cache_hits_total": "counter",
        "num_preemptions_total": "counter",
        "prompt_tokens_total": "counter",
        "generation_tokens_total": "counter",
        "request_success_total": "counter",
        "time_to_first_token_seconds": "histogram",
        "inter_token_latency_seconds": "histogram",
        "e2e_request_latency_seconds": "histogram",
        "request_queue_time_seconds": "histogram",
        "request_prompt_tokens": "histogram",
        "request_generation_tokens": "histogram",
    }
    assert {name: families[f"patchctl_{name}"][0] for name in vllm} == vllm
    ours = {"generation_info", "swaps_total", "engine_up", "engine_restarts_total"}
    assert {f"patchctl_{name}" for name in ours} <= families.keys()
    assert all(name.startswith("patchctl_") for name in families)


def test_numbers_are_those_counted() -> None:
    metrics = Metrics()
    metrics.prompt_tokens, metrics.tokens_out, metrics.swaps, metrics.engine_starts = 10, 20, 4, 3
    metrics.engine.latest = Load(2, 3, 200, 50, 1000, 400, 5, 9, 77)
    for seconds in (0.009, 0.01, 0.3, 100.0):
        metrics.ttft.observe(seconds)
    outcomes: tuple[Outcome, ...] = ("stop", "stop", "length", "engine_error", "client_left")
    for outcome in outcomes:
        metrics.count(outcome)
    families = parse(render_page(metrics, NOW))

    def value(name: str, labels: str = "") -> float:
        return families[f"patchctl_{name}"][1][labels]

    assert (value("num_requests_running"), value("num_requests_waiting")) == (2, 3)
    assert (value("kv_cache_usage_perc"), value("num_preemptions_total")) == (0.25, 5)
    assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (1000, 400)
    assert (value("swaps_total"), value("engine_restarts_total"), value("engine_up")) == (4, 2, 1)
    assert value("request_success_total", '{finished_reason="stop"}') == 2
    assert value("request_failure_total", '{reason="engine_error"}') == 1
    assert value("request_failure_total", '{reason="client_left"}') == 1
    assert value("generation_info", '{generation="2",build="sha256:bb",active="true"}') == 1
    buckets = families["patchctl_time_to_first_token_seconds"][1]
    assert (buckets['_bucket{le="0.01"}'], buckets['_bucket{le="0.5"}'], buckets["_count"]) == (2, 3, 4)
    assert buckets["_sum"] == pytest.approx(100.319)


@pytest.mark.parametrize("outcome", [*get_args(Finish), *get_args(Failure), *get_args(Departure)])
def test_every_outcome_is_counted_once_and_a_client_is_no_failure_of_ours(outcome: Outcome) -> None:
    metrics = Metrics()
    metrics.count(outcome)
    stats = metrics.stats()
    counted = [name for name in ("requests_completed", "requests_failed", "requests_cancelled") if stats[name]]
    assert len(counted) == 1
    assert (counted == ["requests_failed"]) == (outcome in get_args(Failure))


def test_nothing_grows_with_requests() -> None:
    metrics = Metrics()
    sizes = []
    for count in (3000, 10_000):
        for index in range(count):
            metrics.ttft.observe(index * 1e-3)
            metrics.latency.observe(index * 1e-3)
            metrics.count("stop")
        sizes.append(
            (len(metrics.ttft._recent), len(metrics.latency.cumulative()), len(render_page(metrics, NOW).split("\n")))
        )
    assert sizes[0] == sizes[1]
    assert metrics.ttft.percentiles_ms(0.5) == [pytest.approx(8976, abs=1)]
