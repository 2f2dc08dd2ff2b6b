"""Asks torch's CUDA allocator for its snapshot; runs inside the engine process. Not run on a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from snapshots.device.allocator import AllocatorSnapshot, parse_allocator


def read_allocator() -> AllocatorSnapshot | None:
    """The allocator's present state, without the history of past events (which may be megabytes).

    Returns:
        None where this process has no CUDA context: asking would create one.

    Raises:
        AllocatorSnapshotError: this torch gives something else than we know.
    """
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    if not torch.cuda.is_available() or not initialized():
        return None
    take: Callable[..., Any] = torch.cuda.memory.memory_snapshot
    if "include_traces" in inspect.signature(take).parameters:
        return parse_allocator(take(include_traces=False))
    return parse_allocator(take())
