"""Watches every step in the serve loop's thread: probation and the reclaim hook.

Everything here belongs to that thread. Both only signal: the exchange back and the freeing happen at the
next boundary, through the loop's own calls.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from engine.loop import ServeLoop
from engine.memory import ReadMemory
from engine.probation import Breach, Probation, Step
from engine.reclaim import ReclaimHook
from engine.servable import StepFacts, WayBack


class StepWatch:
    """A :class:`engine.servable.StepObserver`.

    Args:
        loop: the loop that is watched.
        read_memory: a look at memory in use.
        blocks_for: KV blocks that make up a number of bytes.
        breached: told as long as the generation on probation serves after a breach.
        fallback: see :meth:`engine.servable.StepObserver.fallback`.
    """

    def __init__(
        self,
        loop: ServeLoop,
        *,
        read_memory: ReadMemory,
        blocks_for: Callable[[int], int],
        breached: Callable[[Breach], None],
        fallback: Callable[[int, str], WayBack | None],
    ) -> None:
        self.probation = Probation()
        self.reclaim = ReclaimHook()
        self._loop = loop
        self._read_memory = read_memory
        self._blocks_for = blocks_for
        self._breached = breached
        self._fallback = fallback
        self._steps = 0
        self._completed = 0
        self._failed = 0
        self._reclaiming = False

    def stepped(self, facts: StepFacts) -> None:
        """After each step."""
        self._steps += 1
        step = self._step(facts)
        active = self._loop.active
        if active is not None and active.number == facts.generation:
            # Else an exchange followed this step, and it says nothing about what serves now.
            self.probation.observe(step)
        if self.probation.running and (breach := self.probation.breach()) is not None:
            self._breached(breach)
        if self.reclaim.due(self._steps) and not self._reclaiming:
            wanted_bytes = self.reclaim.observe(self._read_memory(), self._steps)
            if wanted_bytes:
                self.free(self._blocks_for(wanted_bytes))

    def fallback(self, generation: int, why: str) -> WayBack | None:
        """``generation`` cannot go on."""
        return self._fallback(generation, why)

    def free(self, blocks_max: int) -> Future[int]:
        """Free KV blocks at the next boundary; the result is in bytes. Any thread may ask."""
        self._reclaiming = True
        freed = self._loop.reclaim(blocks_max)
        freed.add_done_callback(self._freed)
        return freed

    def _freed(self, freed: Future[int]) -> None:
        self._reclaiming = False
        if not freed.cancelled():
            self.reclaim.ran(freed.result(), self._steps)

    def _step(self, facts: StepFacts) -> Step:
        metrics = self._loop.metrics
        completed, failed = metrics.requests_completed, metrics.requests_failed
        step = Step(
            shape=(facts.rows, facts.chunk),
            step_ms=facts.step_ms,
            nonfinite_rows=facts.nonfinite,
            completed=completed - self._completed,
            errors=failed - self._failed,
        )
        self._completed, self._failed = completed, failed
        return step
