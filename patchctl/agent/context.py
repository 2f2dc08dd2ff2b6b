"""What a transaction's steps work with, and the small answers they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from engine.build import read_manifest
from engine.wire import Stage
from patchctl.admission.engine import PolicyEngine
from patchctl.admission.policy import PolicySet
from patchctl.agent.host import EngineHost, Repair, Restored
from patchctl.agent.inbox import Inbox
from patchctl.agent.settings import Settings
from patchctl.agent.watch import MemoryWatch
from patchctl.errors import PatchctlError
from patchctl.home import Home
from patchctl.journal.journal import Journal
from patchctl.store import BuildStore
from snapshots.store.store import SnapshotStore


@dataclass(frozen=True, slots=True)
class HostContext:
    """The parts of one engine host.

    Attributes:
        trusted_roots: trusted root JSON by domain name; domains are never merged.
        stopping: set when the agent shuts down; a running transaction then goes back.
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
    snapshots: SnapshotStore
    stopping: threading.Event

    def tokenizer_differs(self, one: str, other: str) -> bool:
        """Whether token ids of two builds may mean other text: then no response may run across a swap."""
        digests = [
            {
                entry.path: entry.sha256
                for entry in read_manifest(self.store.path(digest)).files
                if is_tokenizer(entry.path)
            }
            for digest in (one, other)
        ]
        return digests[0] != digests[1]

    def restore(self, *, drain: bool = False, repair: Repair | None = None) -> Restored:
        """Make both processes serve what the journal says is committed; ``repair`` as for the host.

        Raises:
            PatchctlError: see :meth:`EngineHost.restore`.
        """

        def committed() -> Stage:
            record = self.journal.committed()
            assert record is not None
            return Stage(record.number, str(self.store.path(record.digest)), record.digest)

        return self.host.restore(committed, drain=drain, repair=repair)

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


def is_tokenizer(path: str) -> bool:
    """Whether a build's file decides what token ids mean."""
    return path.startswith("tokenizer")


def unix_now() -> int:
    """Wall-clock seconds; a fact of the gate, read in one place."""
    return int(time.time())
