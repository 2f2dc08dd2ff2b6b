"""Digests of a generation's tensors, from the memory it computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.generation import Generation

DigestTensors = Callable[[Mapping[str, NDArray[np.uint8]]], dict[str, str]]


def dtype_name(tensor: torch.Tensor) -> str:
    """As safetensors and numpy name it, e.g. ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor, uint8 ``[n]``; a view where the tensor lies in host memory."""
    return tensor.view(-1).view(torch.uint8).cpu().numpy()


def inspect_tensors(generation: Generation, digest_tensors: DigestTensors) -> dict[str, Any]:
    """For each named tensor its ``dtype``, ``shape``, ``nbytes`` and ``digest``, or what it is an ``alias_of``.

    ``address`` is where it lies in this process's memory, None on a device. ``derived`` marks buffers that the engine
    computes from the build's configuration: no file of the build holds them.

    Args:
        generation: resident, not being freed.
        digest_tensors: digests named uint8 ``[n]`` arrays.
    """
    tensors: dict[str, Any] = {}
    arrays: dict[str, NDArray[np.uint8]] = {}
    for name, tensor in generation.tensors.items():
        tensors[name] = {
            "dtype": dtype_name(tensor),
            "shape": list(tensor.shape),
            "nbytes": tensor.nbytes,
            "address": tensor.data_ptr() if tensor.device.type == "cpu" else None,
            "derived": name not in generation.weights,
        }
        arrays[name] = as_bytes(tensor)
    for name, digest in digest_tensors(arrays).items():
        tensors[name]["digest"] = digest
    if generation.build.config.tied:
        tensors["lm_head.weight"] = {"alias_of": "model.embed_tokens.weight"}
    return tensors
