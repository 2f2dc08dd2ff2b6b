"""Weights written over those of a running engine, with nothing running on it; and the way back.

``update_weights`` is not atomic: it is called once per bucket and once more, without handles, to finish. So an error
on the way leaves a mixture, which must not serve: the old weights are written back, and if that fails too, nothing is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

from engine.adapters.errors import UpdateFailedError
from engine.adapters.tensorrt_llm.artifact import Artifact
from engine.adapters.tensorrt_llm.engine_set import Checkpoint
from engine.adapters.tensorrt_llm.features import Features
from engine.adapters.tensorrt_llm.resident import Resident
from engine.adapters.tensorrt_llm.vendor import or_failed
from engine.adapters.tensorrt_llm.weights import WeightSource


async def update_in_place(
    resident: Resident,
    target: Artifact,
    generation: int,
    *,
    source: WeightSource,
    features: Features,
    probe: Callable[[Resident], Awaitable[None]],
) -> None:
    """Turn ``resident`` into ``target`` as ``generation``. Nothing may run on it, and it must run to its end.

    Raises:
        UpdateFailedError: it is what it was.
        EngineFailedError: it is neither; it must not serve.
    """
    assert resident.running == 0
    previous = resident.generation
    pausing = "pause" in features
    if pausing:
        # Nothing of ours runs; this keeps out whoever else holds the object.
        await or_failed(resident.llm.pause_generation(), "pause_generation")
    try:
        await _write(resident.llm, target, source)
        if pausing:
            await resident.llm.resume_generation()
        # Before the probe: what it leaves in the reuse cache belongs to the new generation.
        resident.generation = generation
        await probe(resident)
    except Exception as error:
        # Vendor code: it may fail in any way.
        resident.generation = previous
        what = f"the update failed ({type(error).__name__}: {error})"
        await or_failed(_write(resident.llm, resident.artifact, source), f"{what}, and writing the old weights back")
        if pausing:
            await or_failed(resident.llm.resume_generation(), f"{what}, and then resume_generation")
        raise UpdateFailedError(f"generation {resident.generation} serves, its weights written back; {what}") from error
    resident.artifact = target


async def _write(llm: Any, artifact: Artifact, source: WeightSource) -> None:
    assert isinstance(artifact.files, Checkpoint)
    buckets = source.buckets(artifact.folder, artifact.files.weights)
    with closing(buckets):
        # Each step copies to the devices, so in a thread: other engines of this process go on.
        while (handles := await asyncio.to_thread(next, buckets, None)) is not None:
            await llm.update_weights(weights=handles)
    # Without handles: finish, which drops the KV blocks kept for reuse, computed with other weights.
    await llm.update_weights(weights=None)
