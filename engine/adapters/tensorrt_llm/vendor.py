"""Calls into vendor code that must not fail half-way."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from engine.adapters.errors import EngineFailedError


async def or_failed(call: Awaitable[Any], what: str) -> None:
    """Await ``call``; when it raises, nobody knows what state it left.

    Raises:
        EngineFailedError: it raised anything.
    """
    try:
        await call
    except Exception as error:
        # Vendor code: it may fail in any way.
        raise EngineFailedError(f"{what} failed ({type(error).__name__}: {error}): start the engine anew") from error
