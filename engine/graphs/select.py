"""Chooses the graph backend: what fits the device, unless the operator asks for one by name.

Not an option of a build: which backends a host can run is a fact about the host.
"""

from __future__ import annotations

import os

import torch

from engine.graphs.errors import BackendUnavailableError
from engine.graphs.port import GraphBackend
from engine.graphs.tape import TapeBackend

BACKEND_VARIABLE = "PATCHCTL_GRAPH_BACKEND"
# The kind of device that each backend runs on; the first of a kind is its default.
_DEVICES = {"tape": "cpu", "aoti": "cpu", "cuda": "cuda"}


def select_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def backend_name(device_type: str, asked: str | None) -> str:
    """The backend to use.

    Args:
        device_type: ``cpu`` or ``cuda``.
        asked: value of :data:`BACKEND_VARIABLE`; None or empty for the device's default.

    Raises:
        BackendUnavailableError: no such backend, or it does not run on such a device.
    """
    if not asked:
        return next(name for name, kind in _DEVICES.items() if kind == device_type)
    if asked not in _DEVICES:
        raise BackendUnavailableError(f"{BACKEND_VARIABLE}: no backend {asked!r} ({', '.join(_DEVICES)})")
    if _DEVICES[asked] != device_type:
        raise BackendUnavailableError(
            f"{BACKEND_VARIABLE}: {asked} needs a {_DEVICES[asked]} device, not {device_type}"
        )
    return asked


def new_backend(device: torch.device) -> GraphBackend:
    """A backend for one generation on ``device``.

    Raises:
        BackendUnavailableError: the one asked for in the environment cannot work here.
    """
    name = backend_name(device.type, os.environ.get(BACKEND_VARIABLE))
    if name == "cuda":
        from engine.graphs.cuda import CudaBackend

        return CudaBackend()
    if name == "aoti":
        from engine.graphs.aoti import AotiBackend

        return AotiBackend()
    return TapeBackend()
