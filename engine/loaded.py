"""A build in memory: configuration checked, weights mapped, nothing captured yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.bucket import all_buckets
from engine.build import BuildInvalidError, BuildManifest, read_manifest
from engine.errors import LoadError
from engine.kv import KvArena, KvShape, kv_signature
from engine.llama import LlamaConfig, parse_config, tensor_shapes
from engine.model import Llama, StepBuffers
from engine.schedule import Limits
from engine.weights import load_weights, page_in, weights_digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _proceed() -> None:
    """Nobody waits: load at full speed."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedBuild:
    """Weights and what is derived from the manifest."""

    manifest: BuildManifest
    config: LlamaConfig
    model: Llama
    device: torch.device
    weights_digest: str
    kv_signature: str

    @property
    def kv_shape(self) -> KvShape:
        """Size of the arena this build runs in."""
        return KvShape(slots=self.manifest.runtime.batch_sizes[-1], tokens=self.manifest.runtime.contexts[-1])

    @property
    def limits(self) -> Limits:
        """What the scheduler may put into it."""
        shape = self.kv_shape
        return Limits(slots=shape.slots, context=shape.tokens, vocab_size=self.config.vocab_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, mapped or copied."""
        return sum(tensor.nbytes for tensor in self.model.weights.values())

    def new_arena(self) -> KvArena:
        """A zeroed arena of this build's own."""
        dtype = DTYPES[self.manifest.runtime.dtype]
        return KvArena(self.config, self.kv_shape, dtype=dtype, device=self.device)

    def new_buffers(self) -> StepBuffers:
        """Static inputs and outputs for every bucket."""
        runtime = self.manifest.runtime
        return StepBuffers.allocate(
            rows_max=runtime.batch_sizes[-1] + runtime.prefill_chunk_tokens,
            batch_max=runtime.batch_sizes[-1],
            vocab_size=self.config.vocab_size,
            device=self.device,
        )


def load_build(
    folder: Path,
    *,
    device: torch.device,
    expected_digest: str | None = None,
    checkpoint: Callable[[], None] = _proceed,
) -> LoadedBuild:
    """Read the manifest, check the configuration, map and page in the weights.

    Files are not hashed again: the agent verified the folder before it asked.

    Args:
        folder: the build.
        device: where to run.
        expected_digest: refuse another build.
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
    runtime = manifest.runtime
    all_buckets(runtime)
    config = parse_config(manifest.model)
    if runtime.contexts[-1] > config.positions_max:
        raise LoadError(f"runtime: context {runtime.contexts[-1]} is beyond the model's {config.positions_max}")
    weights = load_weights(folder, manifest, tensor_shapes(config), dtype=DTYPES[runtime.dtype])
    for name, tensor in weights.items():
        page_in(tensor)
        weights[name] = tensor.to(device)
        checkpoint()
    shape = KvShape(slots=runtime.batch_sizes[-1], tokens=runtime.contexts[-1])
    return LoadedBuild(
        manifest=manifest,
        config=config,
        model=Llama(config, weights, context_max=runtime.contexts[-1]),
        device=device,
        weights_digest=weights_digest(manifest),
        kv_signature=kv_signature(config, shape, runtime.dtype),
    )
