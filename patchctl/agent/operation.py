"""One running transaction as its watchers see it: every event so far, then the rest as they come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any


class Operation:
    """Events of one transaction, kept so that a late watcher misses nothing."""

    def __init__(self, identifier: str) -> None:
        self.identifier = identifier
        self._events: list[dict[str, Any]] = []
        self._done = False
        self._changed = threading.Condition()

    def emit(self, event: dict[str, Any]) -> None:
        """Add one event."""
        with self._changed:
            self._events.append({"transaction": self.identifier, **event})
            self._changed.notify_all()

    def finish(self, event: dict[str, Any]) -> None:
        """Add the last event."""
        with self._changed:
            self._events.append({"transaction": self.identifier, **event})
            self._done = True
            self._changed.notify_all()

    def follow(self, heartbeat_s: float) -> Iterator[dict[str, Any]]:
        """Yield every event in order; a heartbeat when nothing happens for ``heartbeat_s``."""
        position = 0
        while True:
            with self._changed:
                if position == len(self._events) and not self._done:
                    self._changed.wait(heartbeat_s)
                fresh, done = self._events[position:], self._done
            if not fresh and not done:
                yield {"event": "heartbeat"}
            yield from fresh
            position += len(fresh)
            if done and position == len(self._events):
                return
