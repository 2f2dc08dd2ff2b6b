"""Memory in use by this process, where the model lives."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

_KIB = 1024


def used_bytes(device: torch.device) -> int:
    """On a GPU what the caching allocator has handed out, else anonymous memory of this process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * _KIB
    raise RuntimeError("the kernel does not tell anonymous memory")


def reserved_bytes(device: torch.device) -> int:
    """What the process holds of the device, cached memory included; equal to :func:`used_bytes` elsewhere."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else used_bytes(device)
