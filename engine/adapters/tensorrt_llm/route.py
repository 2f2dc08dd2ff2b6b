"""Which way an update goes: a pure decision."""

from __future__ import annotations

from typing import Literal

from engine.adapters.errors import UpdateRefusedError
from engine.adapters.port import Route


def choose_route(
    wanted: Literal["auto", "in_place", "side_by_side"], *, not_in_place: str, not_beside: str
) -> tuple[Route, str]:
    """The route, and why not the other one.

    Args:
        wanted: a route, or ``auto`` for in place where that is possible.
        not_in_place: why weights cannot be updated in place, or "".
        not_beside: why a second engine cannot be loaded beside the first, or "".

    Raises:
        UpdateRefusedError: the wanted route, or every route, is closed.
    """
    reasons = {"in_place": not_in_place, "side_by_side": not_beside}
    allowed: tuple[Route, ...] = ("in_place", "side_by_side") if wanted == "auto" else (wanted,)
    for route in allowed:
        if not reasons[route]:
            return route, "; ".join(f"not {name}: {why}" for name, why in reasons.items() if name != route and why)
    raise UpdateRefusedError("; ".join(f"not {route}: {reasons[route]}" for route in allowed))
