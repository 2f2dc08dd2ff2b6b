"""The engine's figures as a flat JSON object, for ``Stats``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.generation import Generation
from engine.loop import ServeLoop
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
