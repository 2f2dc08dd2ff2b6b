"""Staging under the memory governor: decide, free what it says, look again, then load."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.build import BuildInvalidError, BuildManifest, read_manifest
from engine.errors import LoadError
from engine.generation import Generation
from engine.governor import Freeable, MemoryRefusedError, StagePlan, plan_stage
from engine.memory import ReadMemory
from engine.need import need_of


@dataclass(slots=True)
class Governor:
    """The governor of one device.

    Args:
        device: ``cpu`` or ``cuda``.
        read_memory: a look at memory in use.
        reclaim: frees up to so many KV blocks kept for their prefix at the next boundary.

    Attributes:
        last: figures of the latest decision, for ``Stats``.
    """

    device: str
    read_memory: ReadMemory
    reclaim: Callable[[int], Future[int]]
    last: dict[str, int | str] = field(default_factory=dict)

    def allow(
        self, manifest: BuildManifest, active: Generation | None, commit_mode: Literal["auto", "exchange", "copy"]
    ) -> StagePlan:
        """Make room for a build; called by the staging thread, waits for a boundary when memory is short.

        Raises:
            LoadError: the manifest asks for what we do not support.
            MemoryRefusedError: it does not fit, even after all that could be freed was freed.
        """
        need = need_of(manifest, device=self.device, serving=None if active is None else active.build.manifest)
        freeable = self._freeable(active)
        try:
            plan = plan_stage(self.read_memory(), need, freeable, commit_mode=commit_mode)
            if plan.relief:
                # What was promised and what the system got back may differ, so the rule is asked again.
                self.reclaim(0 if active is None else active.pool.blocks.idle).result()
                plan = plan_stage(self.read_memory(), need, Freeable(), commit_mode=commit_mode)
        except MemoryRefusedError as error:
            self.last = {"stage_decision": "refused", "stage_arithmetic": str(error)}
            raise
        self.last = {
            "stage_decision": plan.commit_mode,
            "stage_arithmetic": plan.arithmetic,
            "stage_peak_bytes": plan.peak_bytes,
        }
        return plan

    def _freeable(self, active: Generation | None) -> Freeable:
        """Only prefixes, and only where free blocks go back to the system.

        Nothing retired is ever left here: a third generation is refused before, and releasing one waits
        until it is freed. Shrinking the KV pool would free nothing: pages of its free blocks are not in use.
        """
        if active is None or self.device != "cpu":
            return Freeable()
        return Freeable(prefix_kv_bytes=active.pool.blocks.idle * active.pool.block_bytes)


def manifest_of(folder: Path, digest: str) -> BuildManifest:
    """The manifest of the build that is to be staged.

    Raises:
        LoadError: it cannot be read, or belongs to another build.
    """
    try:
        manifest = read_manifest(folder)
    except BuildInvalidError as error:
        raise LoadError(str(error)) from error
    if manifest.digest != digest:
        raise LoadError(f"build is {manifest.digest}, expected {digest}")
    return manifest
