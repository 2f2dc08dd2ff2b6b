"""Chooses the graph backend for the device at hand."""

from __future__ import annotations

import torch

from engine.graphs.port import GraphBackend
from engine.graphs.tape import TapeBackend


def select_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def new_backend(device: torch.device) -> GraphBackend:
    """A backend for one generation on ``device``."""
    if device.type == "cuda":
        from engine.graphs.cuda import CudaBackend

        return CudaBackend()
    return TapeBackend()
