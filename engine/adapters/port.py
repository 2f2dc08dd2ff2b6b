"""What patchctl asks of an engine that somebody else wrote.

The messages are those of patchctl's own engine (:mod:`engine.wire`), so a front does not care which of them answers.
All methods belong to one event loop. At most two generations are resident at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from engine.wire import Load, Submit, Tokens

Route = Literal["in_place", "side_by_side"]


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How to update.

    Attributes:
        route: ``auto`` takes ``in_place`` where it can be had, else ``side_by_side``.
        drain_s_max: how long running requests may take to end.
        hard_stop: end those still running then with finish ``cancelled``, instead of giving up (``in_place``) or
            letting them run on (``side_by_side``).
        keep_old: after ``side_by_side``, keep the old generation for a rollback until it is released.
    """

    route: Literal["auto", "in_place", "side_by_side"] = "auto"
    drain_s_max: float = 30.0
    hard_stop: bool = False
    keep_old: bool = False


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did.

    Attributes:
        drained: no request of the previous generation runs any more.
        rollback: the way back: ``exchange`` while the old generation is resident, else another ``update``.
        why: why not the other route, or "".
    """

    route: Route
    generation: int
    previous: int
    drained: bool
    rollback: Literal["exchange", "update"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class ReclaimReport:
    """What a reclaim did.

    Attributes:
        done: the reuse cache was dropped.
        parked: the KV memory went back to the device too; nobody is served until ``resume``.
        why: why not, or "".
    """

    done: bool
    parked: bool = False
    why: str = ""


class ExternalEngine(Protocol):
    """An engine behind an adapter."""

    @property
    def generation(self) -> int | None:
        """The generation that new requests get, or None before the first load and after close."""

    async def load(self, folder: Path, generation: int) -> None:
        """Load the first build and serve it as ``generation``. The folder was verified by the caller.

        Raises:
            LoadError: no package, no device, no memory, or not a build of this engine.
        """

    def generate(self, request: Submit) -> AsyncGenerator[Tokens]:
        """Stream one request; it begins and ends on one generation. Closing the generator cancels the request.

        Raises:
            RequestRefusedError: the request asks for what this engine cannot do.
            GenerationFailedError: it failed while running.
            EngineFailedError: nobody is served any more.
        """

    async def stats(self) -> Load:
        """Counters and gauges of the active generation; what the engine does not report is 0."""

    async def update(self, folder: Path, generation: int, options: UpdateOptions | None = None) -> UpdateReport:
        """Serve ``folder`` as ``generation`` from now on.

        Raises:
            UpdateRefusedError: not possible here; the message says why not by each route. Nothing was changed.
            BoundaryMissedError: running requests did not end in time. Nothing was changed.
            UpdateFailedError: it failed, and the previous generation still serves.
            EngineFailedError: it failed, and so did the way back.
        """

    async def exchange(self, generation: int) -> None:
        """Give new requests ``generation``, which is resident: rollback after ``side_by_side``.

        Raises:
            UpdateRefusedError: it is not resident.
        """

    async def release(self, generation: int) -> None:
        """End and free a resident generation that does not serve; requests still on it are cancelled.

        Raises:
            UpdateRefusedError: it serves, or is not resident.
        """

    async def reclaim(self, *, park: bool = False, drain_s_max: float = 30.0) -> ReclaimReport:
        """Drop the KV blocks kept for reuse; with ``park``, give the KV memory back to the device too.

        Requests that arrive meanwhile wait. What the engine cannot do is reported, not raised.

        Raises:
            BoundaryMissedError: running requests did not end in time. Nothing was changed.
            EngineFailedError: it failed half-way.
        """

    async def resume(self) -> None:
        """Take the KV memory back after a parking :meth:`reclaim` and serve again; without one, does nothing.

        Raises:
            EngineFailedError: the memory did not come back.
        """

    async def close(self) -> None:
        """Cancel what runs and free everything. Harmless when repeated."""
