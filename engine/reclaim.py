"""The reclaim hook: when memory that only might be useful is given back. Pure.

The serve loop asks between two looks at memory; what is to be freed is freed at the step boundary, by
whoever owns the memory. Two policies: *explicit* frees when told, *threshold* also by itself above
``high``, until memory in use is down to ``low`` (hysteresis: one threshold alone would free a block,
fill it and free it again).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.errors import EngineError
from engine.governor import Memory

PolicyName = Literal["explicit", "threshold"]

# A look costs about 30 µs; a step of the smallest model worth serving takes milliseconds.
LOOK_STEPS = 16
# After a run that freed nothing: whatever fills memory is not ours, and asking again soon costs prefixes
# that were just made.
BACKOFF_STEPS = 256


class ReclaimRefusedError(EngineError):
    """Thresholds that contradict each other."""

    code = "reclaim_refused"


@dataclass(frozen=True, slots=True)
class ReclaimPolicy:
    """``high`` and ``low`` are fractions of the total memory.

    Raises:
        ReclaimRefusedError: not ``0 < low < high <= 1``.
    """

    name: PolicyName = "explicit"
    # As the staging rule: above it, the next patch could not be staged.
    high: float = 0.85
    # A tenth of the memory: enough for minutes of new prefixes.
    low: float = 0.75

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high <= 1:
            raise ReclaimRefusedError(f"need 0 < low < high <= 1, not low {self.low} and high {self.high}")


@dataclass(slots=True)
class ReclaimHook:
    """Decides at each boundary how many bytes to free.

    Attributes:
        policy: replaced at run time.
        runs: times that something was asked for.
        freed_bytes: in all runs.
        last_freed_bytes: in the last one.
    """

    policy: ReclaimPolicy = ReclaimPolicy()
    runs: int = 0
    freed_bytes: int = 0
    last_freed_bytes: int = 0
    _draining: bool = False
    _next_look_step: int = 0

    def configure(self, policy: ReclaimPolicy) -> None:
        """Use ``policy`` from the next look on."""
        self.policy = policy
        self._draining = False
        self._next_look_step = 0

    def due(self, step: int) -> bool:
        """True when the policy wants to know the memory in use before ``step``."""
        return self.policy.name == "threshold" and step >= self._next_look_step

    def observe(self, memory: Memory, step: int) -> int:
        """A look at memory. Returns the bytes to free at this boundary, 0 for none."""
        self._next_look_step = step + LOOK_STEPS
        if self.policy.name != "threshold":
            return 0
        if memory.used_fraction >= self.policy.high:
            self._draining = True
        low_bytes = math.floor(self.policy.low * memory.total_bytes)
        if memory.used_bytes <= low_bytes:
            self._draining = False
        return memory.used_bytes - low_bytes if self._draining else 0

    def ran(self, freed_bytes: int, step: int) -> None:
        """What a run gave back, told or by itself."""
        self.runs += 1
        self.last_freed_bytes = freed_bytes
        self.freed_bytes += freed_bytes
        if not freed_bytes:
            self._draining = False
            self._next_look_step = step + BACKOFF_STEPS

    def as_dict(self) -> dict[str, int | float | str]:
        """Flat, for ``Stats``."""
        return {
            "reclaim_policy": self.policy.name,
            "reclaim_high": self.policy.high,
            "reclaim_low": self.policy.low,
            "reclaim_runs": self.runs,
            "reclaim_freed_bytes": self.freed_bytes,
            "reclaim_last_freed_bytes": self.last_freed_bytes,
        }
