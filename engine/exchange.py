"""What to do about a pending swap at each step boundary. Pure.

- *carry*: weights and KV layout are equal, the running sequences' KV goes over: exchange at once.
- *recompute*: the new generation rebuilds the running sequences' KV beside each step of the old one. In
  the last of these steps it feeds the very tokens that the old one feeds, so at the boundary it lacks
  nothing, and nobody waits for more than the step under way.
- *drain*: admit nothing, exchange when nothing runs, or end what still runs when told to.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from engine.errors import SwapRefusedError

Mode = Literal["carry", "recompute", "drain"]
Policy = Literal["auto", "carry", "recompute", "drain"]

# Steps of rebuilding beside serving before admission is held: a stream of new requests could otherwise
# keep the new generation behind for ever. 64 steps rebuild about 1,000 tokens in chunks of 16.
AHEAD_STEPS_MAX = 64


class Action(enum.Enum):
    """At a step boundary."""

    WAIT = "wait"
    EXCHANGE = "exchange"
    HARD_STOP = "hard_stop"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Boundary:
    """What the serve loop sees at a step boundary.

    Attributes:
        running: sequences running.
        behind: tokens of KV that the target lacks, of the sequence that is furthest behind.
        fits: every running sequence could continue on the target.
        late: the deadline has passed.
        hard_stop: draining has lasted for as long as it may.
    """

    running: int
    behind: int
    fits: bool
    late: bool
    hard_stop: bool = False


def resolve(policy: Policy, *, carries: bool, same_vocabulary: bool) -> Mode:
    """The mode of a swap.

    Args:
        policy: what was asked for.
        carries: weights and KV signature are equal, and both generations use one KV pool.
        same_vocabulary: token ids mean the same tokens.

    Raises:
        SwapRefusedError: ``carry_refused`` when weights or KV layout differ (KV of other weights gives
            text that neither build would write), ``recompute_refused`` when token ids mean other tokens.
    """
    if policy == "drain":
        return "drain"
    if policy == "carry" and not carries:
        raise SwapRefusedError("carry_refused", "the weights or the KV layout differ, KV cannot be carried")
    mode: Mode = "carry" if policy == "carry" or (policy == "auto" and carries) else "recompute"
    if mode == "recompute" and not same_vocabulary:
        raise SwapRefusedError("recompute_refused", "the vocabularies differ, only drain can swap between them")
    return mode


def decide(mode: Mode, boundary: Boundary) -> Action:
    """The action at one boundary.

    A hard stop comes before lateness: whoever set both wants the swap more than the last sequences. Else
    lateness is checked first, so that a deadline is never overrun.
    """
    if mode == "drain" and boundary.hard_stop and boundary.running:
        return Action.HARD_STOP
    if boundary.late:
        return Action.MISS
    if mode == "drain":
        return Action.WAIT if boundary.running else Action.EXCHANGE
    if not boundary.fits:
        return Action.WAIT
    return Action.WAIT if mode == "recompute" and boundary.behind else Action.EXCHANGE


def hold_admission(mode: Mode, ahead_steps: int) -> bool:
    """True while new requests must wait for the exchange."""
    return mode == "drain" or ahead_steps >= AHEAD_STEPS_MAX
