"""Admission: how many requests may wait for the engine, and when a refused client should come back.

Pure bookkeeping. A sequence waits from its submission until the engine begins it. Beyond the limits a new
request is refused at once, with the time after which there will be room: waiting longer than a client's
patience only makes work that nobody takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# Completions of the last half minute or so decide the rate: less is noise, more is slow to see a change.
_RATE_TIME_CONSTANT_S: Final = 30.0
# HTTP's Retry-After has whole seconds. Later than a minute no estimate of ours is worth anything.
_RETRY_S_MIN: Final = 1
_RETRY_S_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait.

    Attributes:
        sequences: more only wait longer than a client's patience.
        prompt_tokens: 16 full contexts of 8192: minutes of prefill on a CPU, seconds on a GPU.
    """

    sequences: int = 64
    prompt_tokens: int = 1 << 17


class AdmissionQueue:
    """Counts what waits; fixed size.

    Args:
        start_s: now, in seconds of the clock that every ``now_s`` comes from.
    """

    def __init__(self, start_s: float, limits: QueueLimits | None = None) -> None:
        self.limits = limits or QueueLimits()
        self.sequences = 0
        self.prompt_tokens = 0
        self._start_s = start_s
        self._updated_s = start_s
        self._weight = 0.0

    def fits(self, sequences: int, prompt_tokens: int) -> bool:
        """Whether ``sequences`` with a prompt of ``prompt_tokens`` each may wait.

        Whatever its prompt, a request that would wait alone fits: else it could never be served.
        """
        if self.sequences + sequences > self.limits.sequences:
            return False
        return self.sequences == 0 or self.prompt_tokens + sequences * prompt_tokens <= self.limits.prompt_tokens

    def enter(self, prompt_tokens: int) -> None:
        """A sequence begins to wait."""
        self.sequences += 1
        self.prompt_tokens += prompt_tokens

    def leave(self, prompt_tokens: int) -> None:
        """A sequence waits no more: the engine began it, or it ended."""
        self.sequences -= 1
        self.prompt_tokens -= prompt_tokens
        assert self.sequences >= 0
        assert self.prompt_tokens >= 0

    def ended(self, now_s: float) -> None:
        """A sequence ended, whatever the reason: there is room at the engine for another."""
        self._weight = self._decayed(now_s) + 1.0
        self._updated_s = now_s

    def rate_per_s(self, now_s: float) -> float:
        """Recent ends per second: an exponential average, corrected for the time before the start."""
        seen = -math.expm1(-(now_s - self._start_s) / _RATE_TIME_CONSTANT_S)
        return self._decayed(now_s) / (_RATE_TIME_CONSTANT_S * seen) if seen > 0 else 0.0

    def retry_after_s(self, now_s: float) -> int:
        """Seconds until half of what waits has begun: then there is room, and the engine is still busy."""
        rate = self.rate_per_s(now_s)
        if rate * _RETRY_S_MAX <= self.sequences / 2:
            return _RETRY_S_MAX
        return max(math.ceil(self.sequences / 2 / rate), _RETRY_S_MIN)

    def _decayed(self, now_s: float) -> float:
        return self._weight * math.exp(-(now_s - self._updated_s) / _RATE_TIME_CONSTANT_S)
