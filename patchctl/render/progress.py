"""Progress of a transaction on stderr: one line a step, with its time. Silent without a terminal."""

from __future__ import annotations

import sys
from typing import Any

_MARKS = {"ok": "✓", "failed": "✗", "hold": "?", "intent": "…"}


class StepPrinter:
    """Prints step events as they arrive.

    Attributes:
        enabled: by default only when stderr is a terminal, so that logs stay clean.
    """

    def __init__(self, *, enabled: bool | None = None, indent: str = "") -> None:
        self.enabled = sys.stderr.isatty() if enabled is None else enabled
        self._live = sys.stderr.isatty()
        self._indent = indent

    def show(self, event: dict[str, Any]) -> None:
        """Print one event of ``AgentClient.deploy`` or ``rollback``."""
        if not self.enabled or event.get("event") != "step":
            return
        phase = event["phase"]
        if phase == "intent":
            if self._live:
                self._write(f"{self._indent}… {event['step']}", end="")
            return
        line = f"{self._indent}{_MARKS[phase]} {event['step']:<16} {event['took_ms']:>9.1f} ms"
        if note := event["data"].get("note"):
            line += f"  {note}"
        if error := event.get("error"):
            line += f"  {error['code']}: {error['why']}"
        self._write(f"\r\x1b[2K{line}" if self._live else line, end="\n")

    def _write(self, text: str, *, end: str) -> None:
        print(text, end=end, file=sys.stderr, flush=True)
