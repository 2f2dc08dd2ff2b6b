"""A swap on its way: from the agent's request to the step boundary."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.exchange import Mode
from engine.generation import Generation
from engine.wire import Reply


@dataclass(slots=True, eq=False)
class PendingSwap:
    """Owned by the serve loop once requested; times are monotonic seconds.

    Attributes:
        target: the generation to exchange to.
        mode: how running sequences keep their KV.
        requested_s: when the agent asked.
        deadline_s: when to give up.
        exchanged: called by the loop at the exchange, before anyone is told.
        missed: called by the loop when the deadline passed.
        ahead_steps: steps of rebuilding done so far.
        reply: resolved at the exchange or the missed deadline.
    """

    target: Generation
    mode: Mode
    requested_s: float
    deadline_s: float
    exchanged: Callable[[], None]
    missed: Callable[[], None]
    ahead_steps: int = 0
    reply: Future[Reply] = field(default_factory=Future)
