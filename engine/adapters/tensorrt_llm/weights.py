"""Weights of a checkpoint as CUDA IPC handles, in the form that ``WorkerExtension.update_weights`` reads.

Per device UUID a base64 text of a pickled list of (tensor name, (rebuild function, its arguments)). Every rank gets
every tensor and keeps its own shard. Not run on a GPU.

The pickle is written for workers of our own engine and never read here.

Source: ``tensorrt_llm/llmapi/rlhf_utils.py`` (commit 65b31db1); the rebuild pairs are those of
``torch.multiprocessing.reductions.reduce_tensor``.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Protocol


class WeightSource(Protocol):
    """Where the handles of an in-place update come from."""

    def buckets(self, folder: Path, files: Sequence[str]) -> Generator[dict[str, str]]:
        """Handles by device UUID, a bounded amount of device memory at a time; closing it frees the last bucket."""


class IpcWeights:
    """Copies tensors to every device, a bucket at a time.

    Args:
        devices: numbers of the ranks' devices.
        uuid_of: TensorRT-LLM's own name for a device, so that workers find theirs.
        bucket_bytes: device memory per bucket; the largest tensor alone may exceed it.
        kind: ``cuda``; another kind only serves tests.
    """

    def __init__(
        self, devices: Sequence[int], *, uuid_of: Callable[[int], str], bucket_bytes: int, kind: str = "cuda"
    ) -> None:
        self._devices = tuple(devices)
        self._uuid_of = uuid_of
        self._bucket_bytes = bucket_bytes
        self._kind = kind

    def buckets(self, folder: Path, files: Sequence[str]) -> Generator[dict[str, str]]:
        """As :class:`WeightSource`. The tensors of a bucket live until the next one is asked for."""
        from safetensors import safe_open

        held: list[tuple[str, Any]] = []
        size = 0
        for name in files:
            with safe_open(folder / name, framework="pt", device="cpu") as stored:
                for key in stored.keys():  # noqa: SIM118 - not a mapping
                    tensor = stored.get_tensor(key)
                    if held and size + tensor.nbytes > self._bucket_bytes:
                        yield from self._bucket(held)
                        held, size = [], 0
                    held.append((key, tensor))
                    size += tensor.nbytes
        if held:
            yield from self._bucket(held)

    def _bucket(self, held: list[tuple[str, Any]]) -> Generator[dict[str, str]]:
        from torch.multiprocessing.reductions import reduce_tensor

        copies = {
            device: [(key, tensor.to(f"{self._kind}:{device}")) for key, tensor in held] for device in self._devices
        }
        yield {
            self._uuid_of(device): _encoded([(key, reduce_tensor(copy)) for key, copy in tensors])  # type: ignore[no-untyped-call]
            for device, tensors in copies.items()
        }


def _encoded(handles: list[tuple[str, Any]]) -> str:
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")
