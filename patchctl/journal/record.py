"""What the journal hands out: plain, frozen, and light enough for the client to import."""

from __future__ import annotations

from typing import Any

import msgspec


class StepRecord(msgspec.Struct, frozen=True):
    """One journal line of a step. ``phase`` is ``intent`` or an outcome; ``data`` is its evidence."""

    step: str
    phase: str
    at_unix_ns: int
    data: dict[str, Any]


class TransactionRecord(msgspec.Struct, frozen=True):
    """One transaction with its steps, oldest first."""

    id: str
    op_id: str
    kind: str
    actor: str
    state: str
    started_unix_ns: int
    ended_unix_ns: int | None
    patch_id: str
    base_digest: str
    target_digest: str
    error: dict[str, Any] | None
    steps: tuple[StepRecord, ...] = ()

    def step_ms(self) -> dict[str, float]:
        """Milliseconds of each ended step, from its intent to its outcome."""
        started: dict[str, int] = {}
        took: dict[str, float] = {}
        for record in self.steps:
            if record.phase == "intent":
                started[record.step] = record.at_unix_ns
            elif record.step in started:
                took[record.step] = (record.at_unix_ns - started[record.step]) / 1e6
        return took


class GenerationRecord(msgspec.Struct, frozen=True):
    """One load of a build. ``state``: staged, committed, rolled-back or discarded."""

    number: int
    digest: str
    version: str
    transaction_id: str | None
    state: str
    committed_unix_ns: int | None
