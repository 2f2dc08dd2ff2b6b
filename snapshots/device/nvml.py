"""Device memory of a process as the NVIDIA driver counts it: contexts and libraries too, which torch does not see.

By ``nvidia-ml-py`` (import name ``pynvml``), which is optional: without it, or without a driver, the answer says why.
Not run on a GPU.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one process uses of one device.

    Attributes:
        uuid: of the device, e.g. ``GPU-8f6b...``.
        used_bytes: None where the driver does not tell (other users' processes, MIG, Windows' driver model).
    """

    index: int
    uuid: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DriverMemory:
    """Devices on which the process runs; none, and ``reason`` why nothing can be known, "" otherwise."""

    devices: tuple[DeviceUse, ...] = ()
    reason: str = ""

    @property
    def used_bytes(self) -> int | None:
        """Over all devices; None when any is not known."""
        parts = [device.used_bytes for device in self.devices]
        known = [part for part in parts if part is not None]
        return None if self.reason or len(known) < len(parts) else sum(known)


def read_driver_memory(pid: int) -> DriverMemory:
    """Ask the driver about one process.

    The driver lists pids of the host: inside a container with a pid namespace of its own, it knows none of ours and
    the process shows on no device.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return DriverMemory(reason="nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
        try:
            return DriverMemory(_devices(nvml, pid))
        finally:
            nvml.nvmlShutdown()
    except Exception as error:  # a boundary: without a driver the library raises errors of its own
        return DriverMemory(reason=f"the NVIDIA driver does not answer: {error}")


def _devices(nvml: Any, pid: int) -> tuple[DeviceUse, ...]:
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mine = [
            process.usedGpuMemory for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if process.pid == pid
        ]
        if mine:
            used = None if None in mine else sum(mine)
            found.append(DeviceUse(index, str(nvml.nvmlDeviceGetUUID(handle)), used))
    return tuple(found)
