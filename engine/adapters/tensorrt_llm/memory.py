"""Whether a second engine fits beside the first, device by device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes."""

    used: int
    total: int


def read_devices(torch: Any) -> tuple[DeviceMemory, ...]:
    """Memory of every device that CUDA shows this process, whoever uses it.

    Args:
        torch: the imported module.
    """
    memory = []
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        memory.append(DeviceMemory(used=total - free, total=total))
    return tuple(memory)


def does_not_fit(devices: Sequence[DeviceMemory], weights: Sequence[int], *, reserve_bytes: int, ceiling: float) -> str:
    """Why a second engine does not fit, with the arithmetic, or "" when it does.

    Args:
        devices: by rank.
        weights: bytes each rank loads.
        reserve_bytes: for activations, graphs, library workspaces and the smallest useful KV cache.
        ceiling: fraction of a device's memory that may be in use afterwards.
    """
    if len(weights) > len(devices):
        return f"{len(weights)} ranks, but {len(devices)} devices"
    for rank, (device, size) in enumerate(zip(devices, weights, strict=False)):
        limit = int(device.total * ceiling)
        if device.used + size + reserve_bytes > limit:
            return (
                f"rank {rank}: {device.used / GIB:.1f} GiB in use + {size / GIB:.1f} weights"
                f" + {reserve_bytes / GIB:.1f} reserve > {limit / GIB:.1f} ({ceiling:.0%} of {device.total / GIB:.1f})"
            )
    return ""
