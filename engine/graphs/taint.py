"""Whether this process still gets its device memory back after a failed capture.

Before torch 2.14 a CUDA graph whose capture failed never releases its memory pool (pytorch#190348): what
the pool holds is lost until the process ends. Serving goes on, but the process should be handed over.
"""

from __future__ import annotations

import re

_POOL_RELEASED_SINCE = (2, 14)


def lost_pool(torch_version: str, *, uses_before: int, uses_after: int) -> str | None:
    """Why the pool of a failed capture is lost, or None when it is not.

    Args:
        torch_version: ``torch.__version__``.
        uses_before: the pool's use count before the capture began.
        uses_after: the same after the failed graph was reset; what is higher is never released.
    """
    if uses_after > uses_before:
        return f"a failed capture left its memory pool in use ({uses_before} users before, {uses_after} after)"
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    if found is None or (int(found[1]), int(found[2])) < _POOL_RELEASED_SINCE:
        return f"torch {torch_version} does not release the memory pool of a failed capture (pytorch#190348)"
    return None


class Taint:
    """Remembers the first reason not to trust a process any longer."""

    def __init__(self) -> None:
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why this process should be handed over to a fresh one, or None."""
        return self._reason

    def mark(self, reason: str) -> None:
        """The process lost something that only its end gives back."""
        self._reason = self._reason or f"{reason}: hand over to a fresh process"


PROCESS = Taint()
