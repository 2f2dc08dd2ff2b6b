"""A swap on its way: from the agent's request to the step boundary."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.exchange import Mode, Policy, resolve
from engine.generation import Generation
from engine.servable import Servable
from engine.wire import Reply


@dataclass(slots=True, eq=False)
class PendingSwap:
    """Owned by the serve loop once requested; times are monotonic seconds.

    Attributes:
        target: the generation to exchange to.
        mode: how running sequences keep their KV.
        ahead: the target can rebuild KV beside serving; in copy mode only one of the two can run.
        requested_s: when the agent asked.
        deadline_s: when to give up.
        hard_stop_s: when a drain ends what still runs; None for never.
        exchanged: called by the loop at the exchange, before anyone is told.
        missed: called by the loop when the deadline passed.
        ahead_steps: steps of rebuilding done so far.
        reply: resolved at the exchange or the missed deadline.
    """

    target: Servable
    mode: Mode
    ahead: bool
    requested_s: float
    deadline_s: float
    hard_stop_s: float | None
    exchanged: Callable[[], None]
    missed: Callable[[], None]
    ahead_steps: int = 0
    reply: Future[Reply] = field(default_factory=Future)


def resolve_mode(policy: Policy, active: Generation, target: Generation) -> tuple[Mode, bool]:
    """The mode of a swap between two generations, and whether the target rebuilds KV ahead.

    Raises:
        SwapRefusedError: see :func:`engine.exchange.resolve`.
    """
    mode = resolve(
        policy,
        carries=target.carries(active),
        same_vocabulary=target.build.config.vocab_size == active.build.config.vocab_size,
    )
    return mode, mode == "recompute" and target.graphs is not active.graphs
