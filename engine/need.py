"""What a build will take, from its manifest alone: the governor's figures before anything is loaded. No IO."""

from __future__ import annotations

import math

from engine.blocks import FIRST_BLOCK
from engine.bucket import all_buckets
from engine.build import BuildManifest
from engine.governor import Need
from engine.kv import KvLayout
from engine.llama import LlamaConfig, parse_config, tensor_shapes

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Per captured graph on CUDA. vLLM's documentation speaks of 1 to 3 GiB for its 35 sizes (models of 7B and
# more), which is 30 to 90 MB each. Not run on a GPU by us. Graphs of the CPU backends are op lists.
_CUDA_GRAPH_BYTES = 64 << 20
# cuBLAS keeps 32 MiB per stream on Hopper (cuBLAS documentation, cublasSetWorkspace); capturing uses one
# stream, serving another. On a CPU: activations of the widest step, which the allocator keeps.
_WORKSPACE_BYTES = {"cuda": 64 << 20, "cpu": 16 << 20}
# On a device, copying holds one chunk beside the weights: large enough to copy at memory speed.
COPY_CHUNK_BYTES = 64 << 20


def need_of(manifest: BuildManifest, *, device: str, serving: BuildManifest | None) -> Need:
    """The need of a build that is staged beside ``serving``.

    Args:
        manifest: of the build.
        device: ``cpu`` or ``cuda``.
        serving: manifest of the serving build, whose weights and KV pool are shared where they are equal.

    Raises:
        LoadError: the configuration or the buckets are not supported.
    """
    config, runtime = parse_config(manifest.model), manifest.runtime
    item_bytes = _ITEM_BYTES[runtime.dtype]
    weights_bytes = _new_weights(manifest, config, item_bytes, serving)
    same_shape = serving is not None and runtime == serving.runtime and config == parse_config(serving.model)
    copy_bytes = None
    if same_shape:
        # On a CPU the serving weights are private file mappings: the pages overwritten become a second
        # set, and the source is mapped as well. Only a device gains.
        copy_bytes = min(weights_bytes, COPY_CHUNK_BYTES) if device == "cuda" else 2 * weights_bytes
    layout = KvLayout.of(config, runtime)
    shares_kv = serving is not None and layout == KvLayout.of(parse_config(serving.model), serving.runtime)
    logits_bytes = (runtime.batch_sizes[-1] + 1) * config.vocab_size * _ITEM_BYTES["float32"]
    return Need(
        weights_bytes=weights_bytes,
        graphs_bytes=len(all_buckets(runtime)) * _CUDA_GRAPH_BYTES if device == "cuda" else 0,
        workspace_bytes=_WORKSPACE_BYTES[device] + logits_bytes + (0 if shares_kv else _kv_bytes(layout)),
        copy_bytes=copy_bytes,
    )


def _new_weights(manifest: BuildManifest, config: LlamaConfig, item_bytes: int, serving: BuildManifest | None) -> int:
    """Bytes in memory of the weight files that the serving build has not mapped in the same dtype."""
    shared: set[str] = set()
    if serving is not None and serving.runtime.dtype == manifest.runtime.dtype:
        shared = {entry.sha256 for entry in serving.weight_files}
    stored_bytes = sum(entry.size_bytes for entry in manifest.weight_files)
    new_bytes = sum(entry.size_bytes for entry in manifest.weight_files if entry.sha256 not in shared)
    memory_bytes = sum(math.prod(shape) for shape in tensor_shapes(config).values()) * item_bytes
    # Files in another dtype than the compute dtype are converted: memory, not the file, is what counts.
    return -(-new_bytes * max(memory_bytes, stored_bytes) // stored_bytes) if stored_bytes else memory_bytes


def _kv_bytes(layout: KvLayout) -> int:
    tokens = (layout.blocks + layout.golden_blocks + FIRST_BLOCK) * layout.block_tokens
    return 2 * layout.layers * tokens * layout.kv_heads * layout.head_dim * _ITEM_BYTES[layout.dtype]
