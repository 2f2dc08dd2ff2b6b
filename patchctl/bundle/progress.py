"""What long operations report while they run."""

from __future__ import annotations

from collections.abc import Callable

# Called as progress(step, detail) before or after each step; raising from it aborts cleanly.
Progress = Callable[[str, str], None]


def silent(step: str, detail: str) -> None:
    """Report nothing."""
    del step, detail
