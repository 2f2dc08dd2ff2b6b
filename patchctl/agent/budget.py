"""How often processes may be replaced before the agent gives up. Pure: time comes in as an argument."""

from __future__ import annotations

from collections import deque

RESTART_WINDOW_S = 60.0


class RestartBudget:
    """Counts restarts in a sliding window.

    Args:
        restarts_max: within :data:`RESTART_WINDOW_S`; at least 1.
    """

    def __init__(self, restarts_max: int) -> None:
        self.restarts_max = restarts_max
        self._at_s: deque[float] = deque(maxlen=restarts_max)

    def spend(self, now_s: float) -> bool:
        """Take one restart; False when too many were taken within the window, and then none is."""
        if len(self._at_s) == self.restarts_max and now_s - self._at_s[0] < RESTART_WINDOW_S:
            return False
        self._at_s.append(now_s)
        return True
