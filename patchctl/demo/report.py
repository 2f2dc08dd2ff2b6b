"""The demo's closing table, and the same as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from patchctl.demo.measure import Gaps, gaps_between, step_data, step_times_ms, swap_gaps
from patchctl.demo.scenario import CLIENTS, Story
from patchctl.render.output import human_bytes, print_pairs, print_table


def as_data(story: Story) -> dict[str, Any]:
    """Everything measured, ready for JSON."""
    responses = story.clients.responses
    baseline = gaps_between(responses, *story.baseline_ns)
    swaps = {
        "1.0.1 swap": (story.transactions["1.0.1"], "swap"),
        "1.0.2 swap": (story.transactions["1.0.2"], "swap"),
        "1.0.2 rollback": (story.transactions["1.0.2"], "rollback"),
    }
    growth = step_data(story.transactions["1.0.1"], "verdict").get("growth", {})
    return {
        "schema": 1,
        "clients": CLIENTS,
        "requests": {
            "completed": sum(1 for response in responses if response.generations is not None),
            "failed": sum(1 for response in responses if response.failure),
            "failures": [response.failure for response in responses if response.failure],
            "tokens": sum(len(response.arrivals_ns) for response in responses),
        },
        "gap_ms": {
            "baseline": asdict(baseline),
            **{name: _gaps(swap_gaps(responses, *which)) for name, which in swaps.items()},
        },
        "exchange_us": {name: step_data(*which).get("exchange_us") for name, which in swaps.items()},
        "patch_bytes": {version: made["size_bytes"] for version, made in story.patches.items()},
        "build_bytes": {version: made["build_size_bytes"] for version, made in story.patches.items()},
        "growth": growth,
        "outcomes": {version: transaction["state"] for version, transaction in story.transactions.items()},
        "reasons": {
            version: (transaction["error"] or {}).get("why", "") for version, transaction in story.transactions.items()
        },
        "refusals": {
            name: {"exit_code": result.exit_code, "error": result.error} for name, result in story.refusals.items()
        },
        "steps_ms": {
            version: {
                "build": story.patches[version]["build_ms"],
                "sign": story.patches[version]["sign_ms"],
                **step_times_ms(transaction),
            }
            for version, transaction in story.transactions.items()
        },
        "active": story.status["active"],
        "took_s": story.took_s,
    }


def _gaps(gaps: Gaps | None) -> dict[str, Any] | None:
    return None if gaps is None else asdict(gaps)


def print_story(data: dict[str, Any]) -> None:
    """The table for people."""
    requests, gaps = data["requests"], data["gap_ms"]
    baseline = gaps["baseline"]
    print_pairs(
        [
            ("requests", f"{requests['completed']} completed, {requests['failed']} failed ({data['clients']} streams)"),
            ("gap between tokens", f"baseline p50 {baseline['p50_ms']:.0f} ms, p99 {baseline['p99_ms']:.0f} ms"),
            *((f"  {name}", _gap_line(gaps[name], data["exchange_us"][name])) for name in gaps if name != "baseline"),
            *((f"patch {version}", _patch_line(data, version)) for version in data["patch_bytes"]),
            *((f"memory a request, {role}", _growth_line(figures)) for role, figures in data["growth"].items()),
            *((name, f"exit {result['exit_code']}") for name, result in data["refusals"].items()),
            ("serving at the end", f"{data['active']['version']} (generation {data['active']['generation']})"),
            ("took", f"{data['took_s']:.0f} s"),
        ]
    )
    print()
    steps = list(dict.fromkeys(step for times in data["steps_ms"].values() for step in times))
    print_table(
        ["STEP (ms)", *data["steps_ms"]],
        [(step, *(_ms(times.get(step)) for times in data["steps_ms"].values())) for step in steps],
    )


def _ms(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.1f}':>8}"


def _patch_line(data: dict[str, Any], version: str) -> str:
    size, build = human_bytes(data["patch_bytes"][version]), human_bytes(data["build_bytes"][version])
    return f"{size} for a build of {build}; {data['outcomes'][version]}"


def _gap_line(gaps: dict[str, Any] | None, exchange_us: float | None) -> str:
    if gaps is None:
        return "-"
    exchanged = "" if exchange_us is None else f", exchange {exchange_us:.0f} µs"
    return f"largest {gaps['max_ms']:.0f} ms, p50 {gaps['p50_ms']:.0f} ms{exchanged}"


def _growth_line(figures: dict[str, Any]) -> str:
    before, after = (_rate(figures[side]) for side in ("before", "after"))
    return f"{before} before, {after} after"


def _rate(value: float | None) -> str:
    return "not known" if value is None else f"{human_bytes(value)}"
