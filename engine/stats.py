"""The engine's figures as flat JSON objects, for the replies to ``Stats`` and ``Stage``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.generation import Generation
from engine.governor import StagePlan
from engine.graphs.taint import PROCESS
from engine.loop import ServeLoop
from engine.stage import StageReport
from engine.swap import SwapMachine


def engine_stats(
    loop: ServeLoop, machine: SwapMachine, resident: Mapping[int, Generation], digests: Mapping[int, str]
) -> dict[str, Any]:
    """Counters, latency windows, and what is resident in which state."""
    pools = {id(generation.pool): generation.pool for generation in resident.values()}
    # Generations of equal weights share them.
    weights = {generation.build.weights_digest: generation.build.weight_bytes for generation in resident.values()}
    return {
        **loop.metrics.as_dict(),
        "running": loop.running,
        "waiting": loop.waiting,
        "active_generation": machine.active or 0,
        "active_digest": digests[machine.active] if machine.active is not None else "",
        "committed_generation": machine.committed or 0,
        "host_state": machine.host.value,
        "kv_bytes": sum(pool.size_bytes for pool in pools.values()),
        "kv_blocks_idle": sum(pool.blocks.idle for pool in pools.values()),
        "weight_bytes": sum(weights.values()),
        "backend": next((generation.graphs.backend.name for generation in resident.values()), ""),
        # Set: GPU memory was lost to a failed capture; hand over to a new process soon.
        "backend_taint": PROCESS.reason or "",
        "generations": [
            {
                "generation": number,
                "digest": digests[number],
                "state": state.value,
                "commit_mode": machine.commit_modes.get(number, ""),
                "breach": machine.breached.get(number, ""),
                "weights_digest": resident[number].build.weights_digest if number in resident else "",
            }
            for number, state in machine.states.items()
        ],
    }


def stage_figures(generation: Generation, report: StageReport, plan: StagePlan) -> dict[str, Any]:
    """What a generation is, how long staging took, and why there was memory for it."""
    return {
        "weights_digest": generation.build.weights_digest,
        "kv_signature": generation.build.kv_signature,
        "mode": "carry" if report.carries else "recompute",
        "commit_mode": plan.commit_mode,
        "load_ms": report.load_ms,
        "capture_ms": report.capture_ms,
        "warm_ms": report.warm_ms,
        "golden": list(generation.golden),
        "memory": plan.arithmetic,
    }
