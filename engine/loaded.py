"""A build in memory: configuration checked, weights mapped, nothing captured yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.blocks import blocks_for
from engine.bucket import all_buckets
from engine.build import BuildInvalidError, BuildManifest, read_manifest
from engine.errors import LoadError
from engine.kv import KvLayout, KvPool, kv_signature
from engine.llama import LlamaConfig, parse_config, tensor_shapes
from engine.model import Llama, StepBuffers
from engine.schedule import Limits
from engine.weights import load_weights, page_in, weights_digest

_KIND = "patchctl-torch"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _proceed() -> None:
    """Nobody waits: load at full speed."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedBuild:
    """Weights and what is derived from the manifest, read from ``folder``."""

    folder: Path
    manifest: BuildManifest
    config: LlamaConfig
    model: Llama
    device: torch.device
    weights_digest: str
    kv_signature: str

    @property
    def kv_layout(self) -> KvLayout:
        """Of the KV pool this build runs in."""
        return KvLayout.of(self.config, self.manifest.runtime)

    @property
    def limits(self) -> Limits:
        """What the scheduler may put into it."""
        runtime = self.manifest.runtime
        return Limits(
            slots=runtime.batch_sizes[-1],
            context=min(runtime.contexts[-1], self.kv_layout.capacity_tokens),
            vocab_size=self.config.vocab_size,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, mapped or copied."""
        return sum(tensor.nbytes for tensor in self.model.weights.values())

    def new_pool(self) -> KvPool:
        """A zeroed KV pool of this build's own."""
        return KvPool(self.kv_layout, dtype=DTYPES[self.manifest.runtime.dtype], device=self.device)

    def golden_pool(self) -> KvPool:
        """A pool for the golden prompt and nothing else."""
        layout = dataclasses.replace(self.kv_layout, blocks=0)
        return KvPool(layout, dtype=DTYPES[self.manifest.runtime.dtype], device=self.device)

    def new_buffers(self) -> StepBuffers:
        """Static inputs and outputs for every bucket."""
        runtime = self.manifest.runtime
        return StepBuffers.allocate(
            rows_max=runtime.batch_sizes[-1] + runtime.prefill_chunk_tokens,
            batch_max=runtime.batch_sizes[-1],
            blocks_max=blocks_for(runtime.contexts[-1], runtime.kv_block_tokens),
            vocab_size=self.config.vocab_size,
            device=self.device,
        )


def load_build(
    folder: Path,
    *,
    device: torch.device,
    expected_digest: str | None = None,
    resident: LoadedBuild | None = None,
    checkpoint: Callable[[], None] = _proceed,
) -> LoadedBuild:
    """Read the manifest, check the configuration, map and page in the weights.

    Files are not hashed again: the agent verified the folder before it asked.

    Args:
        folder: the build.
        device: where to run.
        expected_digest: refuse another build.
        resident: a loaded build; equal weights are shared with it and not loaded again.
        checkpoint: called between tensors; may sleep, or raise to abandon loading.

    Raises:
        LoadError: the build is another one, unsupported, or damaged.
    """
    try:
        manifest = read_manifest(folder)
    except BuildInvalidError as error:
        raise LoadError(str(error)) from error
    if expected_digest is not None and manifest.digest != expected_digest:
        raise LoadError(f"build is {manifest.digest}, expected {expected_digest}")
    if manifest.engine_kind != _KIND:
        raise LoadError(f"build is of kind {manifest.engine_kind}, this engine runs {_KIND}")
    runtime = manifest.runtime
    all_buckets(runtime)
    config = parse_config(manifest.model)
    if runtime.contexts[-1] > config.positions_max:
        raise LoadError(f"runtime: context {runtime.contexts[-1]} is beyond the model's {config.positions_max}")
    digest = weights_digest(manifest)
    if (
        resident is not None
        and resident.weights_digest == digest
        and resident.device == device
        and resident.manifest.runtime.dtype == runtime.dtype
        and tensor_shapes(resident.config) == tensor_shapes(config)
    ):
        weights = dict(resident.model.weights)
    else:
        weights = load_weights(folder, manifest, tensor_shapes(config), dtype=DTYPES[runtime.dtype])
        for name, tensor in weights.items():
            page_in(tensor)
            weights[name] = tensor.to(device)
            checkpoint()
    return LoadedBuild(
        folder=folder,
        manifest=manifest,
        config=config,
        model=Llama(config, weights, context_max=runtime.contexts[-1], block_tokens=runtime.kv_block_tokens),
        device=device,
        weights_digest=digest,
        kv_signature=kv_signature(config, KvLayout.of(config, runtime)),
    )
