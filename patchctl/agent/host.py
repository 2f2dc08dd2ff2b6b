"""The engine host's verbs: stage, swap, release, inspect — always front and engine together."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.wire import Arm, Control, Inspect, Release, Reply, Stage, Stats, Swap
from patchctl.agent.processes import Processes, start_processes
from patchctl.errors import PatchctlError

# Loading and capturing SmolLM2 beside live traffic takes 5-10 s on two shared cores.
_STAGE_S_MAX = 180.0
# Recompute-ahead of four 500-token sequences takes about 20 s on one core.
SWAP_S_MAX = 60.0
# 512 tokens at 12 tokens/s; after that the front itself refuses a third generation.
_DRAIN_S_MAX = 45.0
# The front follows the engine's Exchanged message, which is already in its socket.
_FRONT_FOLLOWS_S_MAX = 10.0


class EngineHost:
    """Owns the process pair. A generation is loaded in both processes or in neither.

    All methods raise PatchctlError with the refusing process's own words.
    """

    def __init__(self, listen: socket.socket) -> None:
        self._listen = listen
        self._processes: Processes | None = None
        self._lock = threading.Lock()
        # The kernel sends the children their parent-death signal when the *thread* that forked them
        # ends (prctl(2)), so they are all started from one that lives as long as this host.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")
        self.active_generation = 0

    @property
    def processes(self) -> Processes:
        """The running pair.

        Raises:
            PatchctlError: ``host.down`` between a crash and the restart.
        """
        if self._processes is None:
            raise PatchctlError(
                code="host.down",
                what="the engine host has no running processes",
                why="they are being restarted or stopped",
                serving="nothing for a moment",
                next_command="patchctl status",
            )
        return self._processes

    def start(self, generation: int, folder: Path, digest: str) -> dict[str, Any]:
        """Start the pair and make ``folder`` the active generation."""
        with self._lock:
            self._processes = self._spawner.submit(start_processes, self._listen).result()
        report = self.stage(generation, folder, digest)
        self.active_generation = generation
        self.arm()
        return report

    def stage(self, generation: int, folder: Path, digest: str) -> dict[str, Any]:
        """Load a verified build in both processes, up to READY; frees it again if either refuses."""
        message = Stage(generation=generation, folder=str(folder), digest=digest)
        self._wait_for_room()
        report = self._engine(message, _STAGE_S_MAX).data
        try:
            self.processes.front_link.call(message, _STAGE_S_MAX)
        except PatchctlError:
            self._engine(Release(generation=generation))
            raise
        return report

    def _wait_for_room(self) -> None:
        """Wait until responses on a released request path have ended: at most two generations, ever."""
        give_up = time.monotonic() + _DRAIN_S_MAX
        while len(self._front(Stats()).data["paths"]) > 1 and time.monotonic() < give_up:
            time.sleep(0.05)

    def swap(self, generation: int, *, drain: bool = False, deadline_s: float = SWAP_S_MAX) -> dict[str, Any]:
        """Exchange to ``generation`` at a step boundary and wait until the front follows.

        ``drain`` lets every running sequence end first; else the engine carries or recomputes their KV.
        """
        message = Swap(generation=generation, policy="drain" if drain else "auto", deadline_s=deadline_s)
        data = self._engine(message, deadline_s + 10.0).data
        give_up = time.monotonic() + _FRONT_FOLLOWS_S_MAX
        while self._front(Stats()).data["active_generation"] != generation:
            if time.monotonic() > give_up:
                raise PatchctlError(
                    code="front.did_not_follow",
                    what="the front did not take over the new generation",
                    why=f"it still runs another request path {_FRONT_FOLLOWS_S_MAX:.0f} s after the exchange",
                    serving="the engine on the new generation, until the rollback that follows",
                    next_command="patchctl status",
                )
            time.sleep(0.01)
        self.active_generation = generation
        return data

    def release(self, generation: int) -> None:
        """Free a generation that does not serve, in both processes."""
        try:
            self._engine(Release(generation=generation))
        finally:
            self._front(Release(generation=generation))

    def inspect(self, generation: int) -> dict[str, Any]:
        """Digest of every named tensor of ``generation``, from live memory."""
        tensors: dict[str, Any] = self._engine(Inspect(generation=generation)).data["tensors"]
        return tensors

    def arm(self) -> dict[str, Any]:
        """Start, or extend to new regions, write tracking in both processes."""
        return {"front": self._front(Arm()).data, "engine": self._engine(Arm()).data}

    def front_stats(self) -> dict[str, Any]:
        """The front's counters."""
        return self._front(Stats()).data

    def engine_stats(self) -> dict[str, Any]:
        """The engine's counters; waits while the engine stages."""
        return self._engine(Stats()).data

    def close(self) -> None:
        """End both processes for good."""
        self.stop()
        self._spawner.shutdown()

    def stop(self) -> None:
        """End both processes; :meth:`start` may start them again."""
        with self._lock:
            processes, self._processes = self._processes, None
        if processes is not None:
            processes.stop()

    def _engine(self, message: Control, timeout_s: float = 60.0) -> Reply:
        return self.processes.engine_link.call(message, timeout_s)

    def _front(self, message: Control, timeout_s: float = 60.0) -> Reply:
        return self.processes.front_link.call(message, timeout_s)
