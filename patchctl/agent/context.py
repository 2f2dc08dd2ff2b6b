"""What a transaction's steps work with, and the small answers they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from patchctl.admission.engine import PolicyEngine
from patchctl.admission.policy import PolicySet
from patchctl.agent.host import EngineHost
from patchctl.agent.inbox import Inbox
from patchctl.agent.settings import Settings
from patchctl.agent.watch import MemoryWatch
from patchctl.errors import PatchctlError
from patchctl.home import Home
from patchctl.journal.journal import Journal
from patchctl.store import BuildStore


@dataclass(frozen=True, slots=True)
class HostContext:
    """The parts of one engine host.

    Attributes:
        trusted_roots: trusted root JSON by domain name; domains are never merged.
        stopping: set when the agent shuts down; a running transaction then goes back.
        restart: replaces the process pair and serves the last committed build; the second line when
            the exchange back fails.
    """

    home: Home
    settings: Settings
    journal: Journal
    host: EngineHost
    store: BuildStore
    inbox: Inbox
    policy: PolicySet
    policy_engine: PolicyEngine
    trusted_roots: Mapping[str, str]
    watch: MemoryWatch
    stopping: threading.Event
    restart: Callable[[], None]

    def check_not_stopping(self) -> None:
        """Raise when the agent is shutting down.

        Raises:
            PatchctlError: ``host.stopping``.
        """
        if self.stopping.is_set():
            raise PatchctlError(
                code="host.stopping",
                what="the transaction did not go on",
                why="the agent is shutting down",
                serving="the last committed generation, until the agent has stopped",
                next_command="patchctl engine serve …",
            )

    def sleep(self, seconds: float) -> None:
        """Wait, unless the agent shuts down.

        Raises:
            PatchctlError: ``host.stopping``.
        """
        self.stopping.wait(seconds)
        self.check_not_stopping()


def unix_now() -> int:
    """Wall-clock seconds; a fact of the gate, read in one place."""
    return int(time.time())
