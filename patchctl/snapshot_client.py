"""Snapshots of an engine host, asked of its agent over the unix socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from patchctl.question import ask, order

# The first snapshot of a 16 GiB model writes all of it: at 100 MB/s, three minutes.
_ANSWER_S_MAX = 600.0
_URL = "/v1/snapshots"


class SnapshotClient:
    """The verbs of ``patchctl snapshot``; all raise ``PatchctlError``, the agent's own refusal unchanged."""

    def __init__(self, agent: Path) -> None:
        self._agent = agent

    def take(self, label: str) -> dict[str, Any]:
        """Capture both processes and the tensors of every resident generation."""
        return order(self._agent, "POST", _URL, {"label": label}, answer_s_max=_ANSWER_S_MAX)

    def entries(self) -> list[dict[str, Any]]:
        """All snapshots, oldest first."""
        found: list[dict[str, Any]] = ask(self._agent, _URL)["snapshots"]
        return found

    def show(self, identifier: str) -> dict[str, Any]:
        """One snapshot."""
        return ask(self._agent, f"{_URL}/{quote(identifier, safe='')}")

    def diff(self, before: str, after: str | None) -> dict[str, Any]:
        """Two snapshots, or one and memory as it is now."""
        body = {"before": before, "after": after}
        return order(self._agent, "POST", f"{_URL}/diff", body, answer_s_max=_ANSWER_S_MAX)

    def verify(self) -> dict[str, Any]:
        """Re-hash everything."""
        return order(self._agent, "POST", f"{_URL}/verify", {}, answer_s_max=_ANSWER_S_MAX)

    def remove(self, identifier: str) -> dict[str, Any]:
        """Delete one snapshot."""
        return order(self._agent, "DELETE", f"{_URL}/{quote(identifier, safe='')}", None, answer_s_max=_ANSWER_S_MAX)

    def restore(self, identifier: str, names: list[str], generation: int | None) -> dict[str, Any]:
        """Write named tensors back into the running engine."""
        body = {"snapshot": identifier, "tensors": names, "generation": generation}
        return order(self._agent, "POST", f"{_URL}/restore", body, answer_s_max=_ANSWER_S_MAX)
