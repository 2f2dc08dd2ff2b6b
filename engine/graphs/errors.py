"""What graph backends refuse beyond a failed capture."""

from __future__ import annotations

from engine.errors import EngineError


class BackendUnavailableError(EngineError):
    """The graph backend asked for cannot work here: no such backend, device or compiler."""

    code = "graph_backend_unavailable"
