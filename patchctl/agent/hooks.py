"""What front and engine let the agent do inside them: start write tracking, give free heap back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from snapshots.capture.heap import release_free_heap
from snapshots.capture.uffd import arm_self


def arm_hook() -> dict[str, Any]:
    """Arm write tracking, after returning free heap to the kernel: a leak could hide in it for a while."""
    trimmed = release_free_heap()
    return {**asdict(arm_self()), "trimmed": trimmed}
