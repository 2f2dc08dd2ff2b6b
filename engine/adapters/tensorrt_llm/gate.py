"""Where requests wait while nothing may run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.adapters.tensorrt_llm.resident import Resident


class Gate:
    """Lets requests in to whatever generation is active at that moment; closed at first.

    Args:
        active: the generation to enter; raises when there is none to be had.
    """

    def __init__(self, active: Callable[[], Resident]) -> None:
        self._active = active
        self._open = asyncio.Event()
        self.waiting = 0

    @property
    def closed(self) -> bool:
        """Whether requests are held back."""
        return not self._open.is_set()

    async def admit(self) -> Resident:
        """Wait until the gate is open and enter the active generation."""
        self.waiting += 1
        try:
            # Closed again before this request had its turn: it waits on.
            while self.closed:
                await self._open.wait()
        finally:
            self.waiting -= 1
        # No await from the check to enter(): a drain that begins later sees this request.
        resident = self._active()
        resident.enter()
        return resident

    def open(self) -> None:
        """Let in whoever waits, and whoever comes."""
        self._open.set()

    def close(self) -> None:
        """Hold back whoever comes."""
        self._open.clear()
