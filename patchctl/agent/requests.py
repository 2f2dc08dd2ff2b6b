"""Bodies of the agent API's requests, with the limits of every number."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

Policy: TypeAlias = Literal["auto", "carry", "recompute", "drain"]
CommitMode: TypeAlias = Literal["auto", "exchange", "copy"]
ReclaimPolicy: TypeAlias = Literal["explicit", "threshold"]

# An hour is longer than any response; beyond it a number is a mistake.
_HARD_STOP_S_MAX = 3600
_Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
HardStop: TypeAlias = Annotated[float, Meta(ge=0, le=_HARD_STOP_S_MAX)]


class SwapOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What the operator asks of a swap; the host refuses what would not be safe.

    Attributes:
        policy: how running sequences keep their KV (see :class:`engine.wire.Swap`).
        commit_mode: how the new weights take their place (see :class:`engine.wire.Stage`).
        hard_stop_after_s: end sequences that a drain still waits for after this time; None: never.
    """

    policy: Policy = "auto"
    commit_mode: CommitMode = "auto"
    hard_stop_after_s: HardStop | None = None


class DeployRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/deploy``."""

    op_id: str
    swap: SwapOptions = SwapOptions()


class RollbackRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/rollback``; ``to`` names a generation, None means the one before."""

    op_id: str
    to: int | None = None


class ReclaimRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/engine/reclaim``; shares of the memory in use (see :class:`engine.wire.Reclaim`)."""

    policy: ReclaimPolicy | None = None
    high: _Share = 0.85
    low: _Share = 0.75
    now: bool = False

    def __post_init__(self) -> None:
        """Refuse thresholds without hysteresis; msgspec turns this into its own error."""
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
