"""What to do about a pending swap at each step boundary. Pure.

- *carry*: weights and KV layout are equal, both generations use one arena: exchange at once.
- *recompute*: the new generation rebuilds the running sequences' KV in its own arena beside each step of
  the old one. When it is one token behind, one decode of all sequences brings it up to date, and the
  exchange follows: nobody waits for more than two steps.
- *drain*: admit nothing, exchange when nothing runs.
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
    AHEAD = "ahead"
    CATCH_UP = "catch_up"
    EXCHANGE = "exchange"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Boundary:
    """What the serve loop sees at a step boundary.

    Attributes:
        running: sequences in slots.
        behind: tokens that the target's arena lacks, of the sequence that is furthest behind.
        fits: every running sequence could continue on the target.
        late: the deadline has passed.
    """

    running: int
    behind: int
    fits: bool
    late: bool


def resolve(policy: Policy, *, shared_arena: bool, same_vocabulary: bool) -> Mode:
    """The mode of a swap.

    Raises:
        SwapRefusedError: ``carry_refused`` when weights or KV layout differ (KV of other weights gives
            text that neither build would write), ``recompute_refused`` when token ids mean other tokens.
    """
    if policy == "drain":
        return "drain"
    if policy == "carry" and not shared_arena:
        raise SwapRefusedError("carry_refused", "the weights or the KV layout differ, KV cannot be carried")
    mode: Mode = "carry" if policy == "carry" or (policy == "auto" and shared_arena) else "recompute"
    if mode == "recompute" and not same_vocabulary:
        raise SwapRefusedError("recompute_refused", "the vocabularies differ, only drain can swap between them")
    return mode


def decide(mode: Mode, boundary: Boundary) -> Action:
    """The action at one boundary; lateness is checked first, so that a deadline is never overrun."""
    if boundary.late:
        return Action.MISS
    if mode == "drain":
        return Action.WAIT if boundary.running else Action.EXCHANGE
    if not boundary.fits:
        return Action.WAIT
    if boundary.behind > 1:
        return Action.AHEAD
    return Action.CATCH_UP if boundary.behind else Action.EXCHANGE


def hold_admission(mode: Mode, ahead_steps: int) -> bool:
    """True while new requests must wait for the exchange."""
    return mode == "drain" or ahead_steps >= AHEAD_STEPS_MAX
