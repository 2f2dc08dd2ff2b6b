"""What front and engine let the agent do inside them: start write tracking, give free heap back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from snapshots.capture.heap import release_free_heap
from snapshots.capture.state import hash_tensors
from snapshots.capture.uffd import arm_self


def digest_hook(tensors: Mapping[str, NDArray[np.uint8]]) -> dict[str, str]:
    """Digests of each MiB of each tensor in hex, so that a change has a place; see :mod:`snapshots.tensor_chunks`."""
    return {name: found.chunks.hex() for name, found in hash_tensors(tensors).items()}


def arm_hook() -> dict[str, Any]:
    """Arm write tracking, after returning free heap to the kernel: a leak could hide in it for a while."""
    trimmed = release_free_heap()
    return {**asdict(arm_self()), "trimmed": trimmed}
