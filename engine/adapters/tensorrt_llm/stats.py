"""From an iteration's statistics to the wire's ``Load``.

Field names: ``tests/unittest/bindings/test_executor_bindings.py`` and the ``/metrics`` example of ``trtllm-serve``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.wire import Load


def load_from(iteration: Mapping[str, Any] | None, *, running: int, waiting: int, swaps: int) -> Load:
    """Counters and gauges; fields that the engine leaves out are 0.

    Args:
        iteration: the newest iteration's statistics, or None when there was none.
        running: requests the adapter has handed over and not got back.
        waiting: requests the adapter holds back.
        swaps: updates and exchanges so far.
    """
    kv = _mapping(iteration, "kvCacheStats")
    queued = min(_count(iteration, "numQueuedRequests"), running)
    per_block = _count(kv, "tokensPerBlock")
    hit, missed = _count(kv, "reusedBlocks"), _count(kv, "missedBlocks")
    return Load(
        running=running - queued,
        waiting=waiting + queued,
        kv_blocks=_count(kv, "maxNumBlocks"),
        kv_blocks_used=_count(kv, "usedNumBlocks"),
        prefix_query_tokens=(hit + missed) * per_block,
        prefix_hit_tokens=hit * per_block,
        preemptions=0,
        swaps=swaps,
        steps=_count(iteration, "iter"),
    )


def _mapping(source: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    value = (source or {}).get(name)
    return value if isinstance(value, Mapping) else {}


def _count(source: Mapping[str, Any] | None, name: str) -> int:
    value = (source or {}).get(name)
    return int(value) if isinstance(value, int | float) and value >= 0 else 0
