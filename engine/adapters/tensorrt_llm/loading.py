"""From a build to a loaded ``LLM`` object: which class, with which arguments, and what a failure means."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from engine.adapters.errors import OutOfDeviceMemoryError, PackageUnusableError
from engine.adapters.tensorrt_llm.artifact import Artifact
from engine.adapters.tensorrt_llm.engine_set import EngineSet
from engine.adapters.tensorrt_llm.memory import GIB
from engine.adapters.tensorrt_llm.package import Package
from engine.adapters.tensorrt_llm.resident import Resident
from engine.adapters.tensorrt_llm.signatures import (
    ASYNC_LLM,
    CUDA_GRAPH_CONFIG,
    KV_CACHE_CONFIG,
    LLM,
    SAMPLING_PARAMS,
    SLEEP_CONFIG,
    TRT_LLM,
)
from engine.errors import LoadError

_MEMORY_WORDS = ("out of memory", "outofmemory", "cuda_error_out_of_memory", "cudaerrormemoryallocation")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How engines are loaded. None of the defaults was measured on a GPU.

    Attributes:
        tensor_parallel_size: GPUs for a checkpoint; an engine set says its own.
        kv_memory_fraction: of the memory that is free after the weights, for KV. TensorRT-LLM's own default, 0.9,
            leaves no room for a second engine.
        memory_ceiling: fraction of a device that two engines may use; the rule of patchctl's own engine.
        reserve_bytes: per device, for the second engine's activations, graphs and smallest KV cache.
        bucket_bytes: device memory for the handles of an in-place update.
        asynchronous: load checkpoints as ``AsyncLLM`` where there is one; it needs Ray and can update in place.
        logprobs: load engine sets so that they can report log probabilities, at the price of gathering logits.
        parkable: ask for memory that can be released and resumed.
        probe: prompt of the one-token request that a new engine must answer before it serves.
    """

    tensor_parallel_size: int = 1
    kv_memory_fraction: float = 0.4
    memory_ceiling: float = 0.85
    reserve_bytes: int = 2 * GIB
    bucket_bytes: int = GIB
    asynchronous: bool = True
    logprobs: bool = False
    parkable: bool = False
    probe: tuple[int, ...] = (1,)


async def load_resident(package: Package, artifact: Artifact, generation: int, options: LoadOptions) -> Resident:
    """Load in a thread, so that another engine of this process goes on meanwhile. Takes minutes for a large model.

    Raises:
        LoadError: the version cannot run this build, or loading failed. What was loaded is shut down again.
    """
    files = artifact.files
    asynchronous = options.asynchronous and "async" in package.features and not isinstance(files, EngineSet)
    name, arguments = (
        _engine_set_arguments(package, artifact, files, options)
        if isinstance(files, EngineSet)
        else _checkpoint_arguments(package, artifact, options, asynchronous=asynchronous)
    )
    llm: Any = None
    try:
        arguments["kv_cache_config"] = package[KV_CACHE_CONFIG](
            free_gpu_memory_fraction=options.kv_memory_fraction, enable_block_reuse=True
        )
        llm = await asyncio.to_thread(package[name], **arguments)
        if asynchronous:
            await llm.setup_async()
    except Exception as error:
        # Vendor code: it may fail in any way, and whatever it did must not stay in device memory.
        if llm is not None:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(llm.shutdown)
        raise load_error(error) from error
    return Resident(
        generation,
        artifact,
        llm,
        asynchronous=asynchronous,
        sampling_params=package[SAMPLING_PARAMS],
        logprobs=options.logprobs,
        salted="salt" in package.features,
    )


def load_error(error: Exception) -> LoadError:
    """The typed form of what a load raised."""
    text = f"{type(error).__name__}: {error}"
    if any(word in text.lower() for word in _MEMORY_WORDS):
        return OutOfDeviceMemoryError(text)
    return error if isinstance(error, LoadError) else LoadError(text)


def _engine_set_arguments(
    package: Package, artifact: Artifact, files: EngineSet, options: LoadOptions
) -> tuple[str, dict[str, Any]]:
    if "engine_set" not in package.features:
        raise PackageUnusableError(
            f"tensorrt_llm {package.version} runs no engine sets, only checkpoints: "
            f"{package.features.why_not('engine_set')}"
        )
    if files.version != package.version:
        raise LoadError(
            f"built by TensorRT-LLM {files.version}, installed is {package.version}: an engine is not portable"
        )
    arguments: dict[str, Any] = {"model": str(artifact.folder), "skip_tokenizer_init": True}
    if options.logprobs:
        arguments["gather_generation_logits"] = True
    return TRT_LLM, arguments


def _checkpoint_arguments(
    package: Package, artifact: Artifact, options: LoadOptions, *, asynchronous: bool
) -> tuple[str, dict[str, Any]]:
    if "checkpoint" not in package.features:
        raise PackageUnusableError(
            f"tensorrt_llm {package.version} runs no checkpoints: {package.features.why_not('checkpoint')}"
        )
    arguments: dict[str, Any] = {
        "model": str(artifact.folder),
        "skip_tokenizer_init": True,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_iter_perf_stats": True,
        "cuda_graph_config": package[CUDA_GRAPH_CONFIG](
            batch_sizes=list(artifact.manifest.runtime.batch_sizes), enable_padding=True
        ),
    }
    if asynchronous and options.parkable and "sleep_config" in package.features:
        arguments["sleep_config"] = package[SLEEP_CONFIG]()
    return (ASYNC_LLM if asynchronous else LLM), arguments
