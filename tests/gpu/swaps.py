"""Checks of the whole engine: commit modes compared, token identity, many swaps under load."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal

from tests.gpu.harness import Engine
from tests.gpu.memory import reserved_bytes, used_bytes
from tests.gpu.plan import Build, Context
from tests.gpu.report import Row, quantile, spread

_MIB = 2**20
# The targets of the design (swap.md, section "What to beat").
_EXCHANGE_US_P99 = 100.0
_MEMORY_SHARE = 0.01
_STEPS_BETWEEN = 8


def _engine(context: Context) -> Engine:
    scale = context.scale
    return Engine(context.device, context.first, vocab=scale.vocab, context=scale.runtime.contexts[-1])


def commit_modes(context: Context) -> list[Row]:
    """Swaps to and fro between two resident builds under load: graphs of its own against weights copied in."""
    rows = []
    modes: tuple[Literal["exchange", "copy"], ...] = ("exchange", "copy")
    for mode in modes:
        with _engine(context) as engine:
            engine.keep_busy(context.scale.streams)
            engine.wait_for_steps(_STEPS_BETWEEN)
            staged = engine.stage(2, context.other, mode)
            engine.forget()
            replies = []
            for number in range(context.scale.exchanges):
                replies.append(engine.swap(1 + (number + 1) % 2))
                engine.wait_for_steps(_STEPS_BETWEEN)
            rows += _figures(mode, staged, replies, engine)
    return rows


def _figures(mode: str, staged: dict[str, Any], replies: list[dict[str, Any]], engine: Engine) -> list[Row]:
    steady, swapped = engine.gaps_ms()
    exchange_us = [reply["exchange_us"] for reply in replies]
    target = max(quantile(steady, 0.99), 2 * quantile(steady, 0.5))
    worst = quantile(swapped, 0.99)
    p99_us = quantile(exchange_us, 0.99)
    return [
        Row(f"{mode}: mode of the swaps", ", ".join(sorted({str(reply["mode"]) for reply in replies}))),
        Row(f"{mode}: capture while serving", round(staged["capture_ms"], 1), "ms"),
        *spread(f"{mode}: exchange of references", exchange_us, "us"),
        *spread(f"{mode}: copy of weights", [reply["copy_ms"] for reply in replies], "ms"),
        *spread(f"{mode}: gap between steps, no swap", steady, "ms"),
        *spread(f"{mode}: gap at the swap", swapped, "ms"),
        Row(f"{mode}: exchange p99", round(p99_us, 2), "us", f"< {_EXCHANGE_US_P99:.0f}", p99_us < _EXCHANGE_US_P99),
        Row(f"{mode}: gap at the swap, p99", round(worst, 2), "ms", f"<= {target:.2f}", _if(mode, worst <= target)),
        Row(f"{mode}: failed or aborted", _bad(engine), target="0", met=_bad(engine) == 0),
    ]


def _if(mode: str, met: bool) -> bool | None:
    """The gap's target is for exchanging; copying is compared with it, not held to it."""
    return met if mode == "exchange" else None


def _bad(engine: Engine) -> int:
    return engine.ended["error"] + engine.ended["cancelled"]


def same_weights(context: Context) -> list[Row]:
    """A swap between equal weights in the middle of answers: nobody can tell, under any policy."""
    rows = []
    policies: tuple[Literal["auto", "carry", "recompute", "drain"], ...] = ("auto", "carry", "recompute", "drain")
    with _engine(context) as engine:
        expected = engine.answer(context.scale.streams)
        engine.stage(2, context.twin)
        for number, policy in enumerate(policies):
            swap = partial(engine.swap, 1 + (number + 1) % 2, policy)
            found = engine.answer(context.scale.streams, swap)
            same = sum(left == right for left, right in zip(expected, found, strict=True))
            rows.append(
                Row(
                    f"{policy}: answers equal to no swap", same, f"of {len(found)}", str(len(found)), same == len(found)
                )
            )
    return rows


def many_swaps(context: Context) -> list[Row]:
    """Stage, swap, release, again and again under load; memory and answers afterwards."""
    scale, builds = context.scale, (context.twin, context.other, context.first)
    stage_ms: list[float] = []
    replies: list[dict[str, Any]] = []
    with _engine(context) as engine:
        engine.keep_busy(scale.streams)
        engine.wait_for_steps(_STEPS_BETWEEN)
        # One round first: what libraries keep for good is not the swaps' doing.
        serving = _round(engine, 1, context.first, stage_ms, replies)
        base = used_bytes(context.device), reserved_bytes(context.device)
        stage_ms.clear()
        replies.clear()
        engine.forget()
        began = time.monotonic()
        while len(replies) < scale.swaps and time.monotonic() - began < scale.swaps_s_max:
            serving = _round(engine, serving, builds[len(replies) % len(builds)], stage_ms, replies)
        took_s = time.monotonic() - began
        grown = used_bytes(context.device) - base[0], reserved_bytes(context.device) - base[1]
        steady, swapped = engine.gaps_ms()
        engine.settle()
        flat = grown[0] <= _MEMORY_SHARE * base[0]
        return [
            Row("swaps", len(replies), target=f"{scale.swaps}", met=len(replies) == scale.swaps),
            Row("swaps took", round(took_s, 1), "s"),
            *spread("stage beside serving", stage_ms, "ms"),
            *spread("exchange of references", [reply["exchange_us"] for reply in replies], "us"),
            *spread("gap between steps, no swap", steady, "ms"),
            *spread("gap at the swap", swapped, "ms"),
            Row("memory in use before", round(base[0] / _MIB, 1), "MiB"),
            Row("memory in use, growth", round(grown[0] / _MIB, 2), "MiB", f"<= {_MEMORY_SHARE:.0%}", flat),
            Row("memory reserved, growth", round(grown[1] / _MIB, 2), "MiB"),
            Row("answers", engine.ended.total()),
            Row("failed or aborted", _bad(engine), target="0", met=_bad(engine) == 0),
        ]


def _round(engine: Engine, serving: int, build: Build, stage_ms: list[float], replies: list[dict[str, Any]]) -> int:
    began = time.perf_counter()
    engine.stage(serving + 1, build)
    stage_ms.append((time.perf_counter() - began) * 1e3)
    replies.append(engine.swap(serving + 1))
    engine.release(serving)
    return serving + 1
