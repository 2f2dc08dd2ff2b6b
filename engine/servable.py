"""What the serve loop needs of a generation, and whom it tells about its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.schedule import Limits, StepPlan
from engine.table import KvSpace


class Servable(Protocol):
    """A loaded, warmed and verified build."""

    @property
    def number(self) -> int:
        """The generation's number."""

    @property
    def space(self) -> KvSpace:
        """Where its KV lies."""

    @property
    def limits(self) -> Limits:
        """What the scheduler may put into it."""

    @property
    def chunk_tokens_max(self) -> int:
        """Tokens that one step can prefill."""

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Compute one step.

        Returns:
            float32 ``[n, vocab_size]`` on the CPU, a row for each feed of ``plan.feeds`` that emits, in
            order; None when none does.
        """

    def install(self) -> None:
        """Make it ready to run: in copy mode its weights replace those in place."""

    def give_back(self) -> int:
        """Return memory of free KV blocks to the system, between steps; returns the bytes."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step as its observer sees it.

    Attributes:
        generation: that ran it.
        step_ms: how long it took, delivery included.
        rows: sequences that decoded.
        chunk: a prompt was prefilled beside them.
        nonfinite: rows whose logits were not finite.
    """

    generation: int
    step_ms: float
    rows: int
    chunk: bool
    nonfinite: int


@dataclass(frozen=True, slots=True)
class WayBack:
    """What to serve when the active generation cannot go on; ``carries``: its KV is what this one would have made."""

    generation: Servable
    carries: bool


class StepObserver(Protocol):
    """Watches the serve loop from its own thread; must return at once."""

    def stepped(self, facts: StepFacts) -> None:
        """After each step."""

    def fallback(self, generation: int, why: str) -> WayBack | None:
        """``generation`` cannot go on (non-finite output, failing step): what to serve from this boundary on.

        Returning a way back means that the exchange is recorded; None: there is nothing to go back to.
        """
