"""Every point of TensorRT-LLM's API that the adapter touches, and where it was read.

One table, three uses: what the installed version offers is decided by it (:mod:`.features`), the strict fake is
built from it (:mod:`.testing`), and a contract test compares it with the real package where that is installed.
Facts only; no version number is ever compared to decide what is possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Feature = Literal[
    "core", "engine_set", "checkpoint", "salt", "async", "in_place", "pause", "reuse_reset", "park", "sleep_config"
]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a fact was read: a file of the repository NVIDIA/TensorRT-LLM, or a page of its published documentation.

    Attributes:
        version: as the source itself says, or "" where only the commit is known.
        commit: or "" for documentation.
    """

    version: str
    commit: str
    path: str


@dataclass(frozen=True, slots=True)
class Point:
    """One thing the adapter touches.

    Attributes:
        name: ``module:qualified.name``.
        feature: what fails without it.
        kind: ``function``, ``coroutine`` or ``class`` is called; a ``value`` is read.
        parameters: names the adapter passes, by keyword.
        fields: further keywords that a ``**kwargs`` takes on behalf of ``fields_of``.
        fields_of: the pydantic model whose fields these are.
        omitted: parameters the adapter relies on leaving out, so they must have a default.
        extra: a parameter that is only passed where it exists, and the feature that it makes.
    """

    name: str
    feature: Feature
    kind: Literal["class", "function", "coroutine", "value"]
    source: Source
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    fields_of: str = ""
    omitted: tuple[str, ...] = ()
    extra: tuple[str, Feature] | None = None


_LLM = Source("", "4c05a74891e4df8066f08ed4ce14b0972abe4e25", "tensorrt_llm/llmapi/llm.py")
_TRT = Source("", "cd8f10dfc83fc4d2f057388e8e834a1528d0fd29", "tensorrt_llm/_tensorrt_engine/__init__.py")
_ARGS = Source("", "ea35fd6735a7f08fa93289e07b953a2d8a37a2cf", "tests/unittest/api_stability/references/llm.yaml")
_INIT = Source("", "5ca85aff65b2c7d0ba06fb6c7d7c015ed78886f8", "tensorrt_llm/llmapi/__init__.py")
_SAMPLING = Source("", "a98a9061d72f6fd39f5d055ebdd2c6878a100e2c", "tensorrt_llm/sampling_params.py")
_RESULT = Source("", "a678b91aafbeff265cd0b764abb59d7def624ac2", "tensorrt_llm/executor/result.py")
_VERSION = Source("1.2.0rc2", "b35ac1b64368513d215c57d2ed01d62d910df8da", "tensorrt_llm/version.py")
_ASYNC = Source("", "62e51e522c151e9ec8631eae540c32cbeb925362", "tensorrt_llm/_torch/async_llm.py")
_PAUSE = Source("1.3.0rc13", "", "docs: _modules/tensorrt_llm/_torch/async_llm.html")
_WORKER = Source("", "65b31db1b401d3752b8ebe7c29093cbfb6af04b7", "tensorrt_llm/llmapi/rlhf_utils.py")
_RESET = Source("", "04762f3b82e2410c84ccdfd7901844831147668a", "tensorrt_llm/llmapi/rlhf_utils.py")
_UTILS = Source("", "a678b91aafbeff265cd0b764abb59d7def624ac2", "tensorrt_llm/_torch/utils.py")
_SLEEP = Source("1.4.0rc4", "", "docs: features/sleep-wakeup.html, llm-api/reference.html")

LLM = "tensorrt_llm:LLM"
TRT_LLM = "tensorrt_llm._tensorrt_engine:LLM"
ASYNC_LLM = "tensorrt_llm._torch.async_llm:AsyncLLM"
SAMPLING_PARAMS = "tensorrt_llm.llmapi:SamplingParams"
KV_CACHE_CONFIG = "tensorrt_llm.llmapi:KvCacheConfig"
CUDA_GRAPH_CONFIG = "tensorrt_llm.llmapi:CudaGraphConfig"
SLEEP_CONFIG = "tensorrt_llm.llmapi:SleepConfig"
WORKER_EXTENSION = "tensorrt_llm.llmapi.rlhf_utils:WorkerExtension"
DEVICE_UUID = "tensorrt_llm._torch.utils:get_device_uuid"
VERSION = "tensorrt_llm:__version__"
_REQUEST_OUTPUT = "tensorrt_llm.llmapi:RequestOutput"
_COMPLETION_OUTPUT = "tensorrt_llm.llmapi:CompletionOutput"
_TORCH_ARGS = "tensorrt_llm.llmapi:TorchLlmArgs"
_TRT_ARGS = "tensorrt_llm.llmapi:TrtLlmArgs"

_CONSTRUCTOR = ("model", "skip_tokenizer_init")
_TORCH_FIELDS = ("kv_cache_config", "cuda_graph_config", "enable_iter_perf_stats")
_SAMPLING_FIELDS = (
    *("end_id", "pad_id", "max_tokens", "stop_token_ids", "detokenize", "seed", "temperature", "top_k", "top_p"),
    *("min_p", "presence_penalty", "frequency_penalty", "logprobs"),
)


def _llm(name: str, feature: Feature) -> tuple[Point, ...]:
    """The methods that every LLM class has."""
    generate = ("inputs", "sampling_params", "streaming")
    return (
        Point(f"{name}.generate_async", feature, "function", _LLM, generate, extra=("cache_salt", "salt")),
        Point(f"{name}.get_stats_async", feature, "function", _LLM, ("timeout",)),
        Point(f"{name}.shutdown", feature, "function", _LLM),
    )


POINTS: tuple[Point, ...] = (
    Point(VERSION, "core", "value", _VERSION),
    Point(SAMPLING_PARAMS, "core", "class", _SAMPLING, _SAMPLING_FIELDS),
    Point(KV_CACHE_CONFIG, "core", "class", _ARGS, ("free_gpu_memory_fraction", "enable_block_reuse")),
    Point(f"{_REQUEST_OUTPUT}.outputs", "core", "value", _RESULT),
    Point(f"{_REQUEST_OUTPUT}.finished", "core", "value", _RESULT),
    Point(f"{_REQUEST_OUTPUT}.abort", "core", "function", _RESULT),
    Point(f"{_REQUEST_OUTPUT}.__aiter__", "core", "function", _RESULT),
    Point(f"{_COMPLETION_OUTPUT}.token_ids", "core", "value", _RESULT),
    Point(f"{_COMPLETION_OUTPUT}.logprobs", "core", "value", _RESULT),
    Point(f"{_COMPLETION_OUTPUT}.finish_reason", "core", "value", _RESULT),
    Point("tensorrt_llm.executor.result:Logprob.logprob", "core", "value", _RESULT),
    Point(
        TRT_LLM, "engine_set", "class", _TRT, _CONSTRUCTOR, ("kv_cache_config", "gather_generation_logits"), _TRT_ARGS
    ),
    *_llm(TRT_LLM, "engine_set"),
    Point(LLM, "checkpoint", "class", _LLM, (*_CONSTRUCTOR, "tensor_parallel_size"), _TORCH_FIELDS, _TORCH_ARGS),
    Point(CUDA_GRAPH_CONFIG, "checkpoint", "class", _INIT, ("batch_sizes", "enable_padding")),
    *_llm(LLM, "checkpoint"),
    Point(ASYNC_LLM, "async", "class", _ASYNC, (*_CONSTRUCTOR, "tensor_parallel_size"), _TORCH_FIELDS, _TORCH_ARGS),
    Point(f"{ASYNC_LLM}.setup_async", "async", "coroutine", _ASYNC),
    Point(f"{ASYNC_LLM}.collective_rpc", "async", "coroutine", _ASYNC, ("method",)),
    *_llm(ASYNC_LLM, "async"),
    Point(f"{ASYNC_LLM}.update_weights", "in_place", "coroutine", _ASYNC, ("weights",)),
    Point(
        f"{WORKER_EXTENSION}.update_weights",
        "in_place",
        "function",
        _WORKER,
        ("ipc_handles",),
        omitted=("ipc_handles",),
    ),
    Point(DEVICE_UUID, "in_place", "function", _UTILS, ("device_idx",)),
    Point(f"{ASYNC_LLM}.pause_generation", "pause", "coroutine", _PAUSE),
    Point(f"{ASYNC_LLM}.resume_generation", "pause", "coroutine", _PAUSE),
    Point(f"{WORKER_EXTENSION}.reset_prefix_cache", "reuse_reset", "function", _RESET),
    Point(f"{ASYNC_LLM}.release", "park", "coroutine", _ASYNC, ("tags",)),
    Point(f"{ASYNC_LLM}.resume", "park", "coroutine", _ASYNC, ("tags",)),
    Point(SLEEP_CONFIG, "sleep_config", "class", _SLEEP),
    Point(f"{_TORCH_ARGS}.sleep_config", "sleep_config", "value", _SLEEP),
)


def point(name: str) -> Point:
    """The entry called ``name``."""
    return next(entry for entry in POINTS if entry.name == name)
