"""Sampling options of the wire as arguments of ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.adapters.errors import RequestRefusedError
from engine.wire import Submit

# "No end token" for the executor: it is what the LLM API itself passes for ignore_eos
# (tensorrt_llm/executor/base_worker.py).
_NO_END = -1


def sampling_arguments(request: Submit, new_seed: Callable[[], int]) -> dict[str, Any]:
    """Keyword arguments for ``SamplingParams``.

    Defaults are left out, so a field that an older version lacks only matters to who asks for it.

    Args:
        request: what is asked.
        new_seed: gives a random seed. Without one the runtime always uses seed 0, so that equal prompts would get
            equal "random" answers.

    Raises:
        RequestRefusedError: an option has no counterpart.
    """
    sampling = request.sampling
    if sampling.logit_bias:
        raise RequestRefusedError("logit_bias is not offered with TensorRT-LLM")
    stops = request.stop_tokens
    arguments: dict[str, Any] = {
        "end_id": stops[0] if stops else _NO_END,
        "pad_id": stops[0] if stops else 0,
        "max_tokens": request.tokens_max,
        "detokenize": False,
    }
    if stops:
        arguments["stop_token_ids"] = list(stops)
    if sampling.temperature == 0:
        # The one spelling that is greedy in every version: older ones sample at temperature 0.
        arguments["top_k"] = 1
    else:
        arguments["temperature"] = sampling.temperature
        arguments["top_k"] = sampling.top_k
        arguments["top_p"] = sampling.top_p
        arguments["seed"] = new_seed() if sampling.seed is None else sampling.seed
        if sampling.min_p:
            arguments["min_p"] = sampling.min_p
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(sampling, name):
            arguments[name] = value
    if sampling.logprobs is not None:
        # 0 would switch them off; the alternatives are dropped again in the stream.
        arguments["logprobs"] = max(1, sampling.logprobs)
    return arguments
