"""Digests of a generation's tensors, from the memory it computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.generation import Generation

DigestTensors = Callable[[Mapping[str, NDArray[np.uint8]]], dict[str, str]]


def inspect_tensors(generation: Generation, digest_tensors: DigestTensors) -> dict[str, Any]:
    """For each named tensor its ``dtype``, ``shape`` and ``digest``, or what it is an ``alias_of``.

    Args:
        generation: resident, not being freed.
        digest_tensors: digests named uint8 ``[n]`` arrays.
    """
    tensors: dict[str, Any] = {}
    arrays: dict[str, NDArray[np.uint8]] = {}
    for name, tensor in generation.weights.items():
        tensors[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        arrays[name] = tensor.view(-1).view(torch.uint8).cpu().numpy()
    for name, digest in digest_tensors(arrays).items():
        tensors[name]["digest"] = digest
    if generation.build.config.tied:
        tensors["lm_head.weight"] = {"alias_of": "model.embed_tokens.weight"}
    return tensors
