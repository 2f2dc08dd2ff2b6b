"""The engine host's verbs: stage, swap, release, restore — always front and engine together."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.wire import Arm, Inspect, Reclaim, Release, Stage, Stats, Swap
from patchctl.agent.budget import RESTART_WINDOW_S, RestartBudget
from patchctl.agent.link import ControlLink
from patchctl.agent.pair import STAGE_S_MAX, ProcessPair
from patchctl.agent.processes import ROLES, Role
from patchctl.agent.requests import CommitMode, Policy
from patchctl.agent.settings import RESTARTS_MAX
from patchctl.errors import ExitCode, PatchctlError
from patchctl.faults import reach

# Recompute-ahead of four 500-token sequences takes about 20 s on one core.
SWAP_S_MAX = 60.0
# Beyond the swap's own deadline the engine is stuck: its reply is one message away.
_REPLY_MARGIN_S = 10.0
# 512 tokens at 12 tokens/s; after that the front itself refuses a third generation.
_DRAIN_S_MAX = 45.0
# The front follows the engine's Exchanged message, which is already in its socket.
_FRONT_FOLLOWS_S_MAX = 10.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Restored:
    """What it took to serve the committed build.

    Attributes:
        replaced: roles whose process was replaced, and why.
        exchange: what the engine said about the exchange back; empty when there was none.
        repaired: tensors that a stored snapshot had to be put back into.
    """

    replaced: Mapping[Role, str]
    exchange: dict[str, Any]
    repaired: tuple[str, ...] = ()


# Makes the tensors of a resident generation what they were when it was committed; returns the names put back.
Repair = Callable[[int], tuple[str, ...]]


class EngineHost:
    """Owns the process pair. A generation is loaded in both processes or in neither.

    All methods raise PatchctlError with the refusing process's own words.

    Args:
        listen: listening socket for HTTP.
        restarts_max: within a minute; a build that cannot stay up must not be restarted for ever.
    """

    def __init__(self, listen: socket.socket, *, restarts_max: int = RESTARTS_MAX) -> None:
        self.processes = ProcessPair(listen)
        self._lock = threading.RLock()
        self._restarts = RestartBudget(restarts_max)
        # Between asking for an exchange and knowing its outcome, only the engine knows what it serves.
        self._exchanging = False
        # The engine counts over all generations; what an earlier one spoiled is not the present one's.
        self._nonfinite_rows_before = 0
        self.active_generation = 0

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """While inside, no other thread replaces a process."""
        with self._lock:
            yield

    # -- what must serve

    def start(self, generation: int, folder: Path, digest: str) -> None:
        """Start both processes and make ``folder`` the active generation."""
        self.restore(lambda: Stage(generation, str(folder), digest))

    def restore(self, committed: Callable[[], Stage], *, drain: bool = False, repair: Repair | None = None) -> Restored:
        """Make both processes serve the committed build; replaces those that are gone or cannot.

        The engine survives its front and the front its engine: only what is lost is started anew.

        Args:
            committed: says which build that is; called when no other thread can change it any more.
            drain: let running sequences end before an exchange back.
            repair: second line when that fails, or the generation it leads to is not what was committed; the third
                replaces the engine.

        Raises:
            PatchctlError: ``host.cannot_serve`` after too many restarts, or why the build was not loaded.
        """
        with self._lock:
            build = committed()
            lost = self.processes.lost()
            exchange: dict[str, Any] = {}
            repaired: tuple[str, ...] = ()
            if "engine" not in lost:
                try:
                    exchange, repaired = self._back(build.generation, drain=drain, repair=repair)
                except PatchctlError as error:
                    lost["engine"] = error.why
            if "front" not in lost:
                try:
                    self.processes.link("front").call(build)  # held already, as a rule: then it changes nothing
                except PatchctlError as error:
                    lost["front"] = error.why
            if lost:
                self._replace(lost, build)
            self._front_follows(self.processes.link("front"), build.generation)
            if "engine" in lost:
                self._free_all_but(build.generation)
            if "engine" in lost or self._exchanging:
                self._took_over(build.generation)
            return Restored(lost, exchange, repaired)

    def _took_over(self, generation: int) -> None:
        self.active_generation, self._exchanging = generation, False
        self._nonfinite_rows_before = self.engine_stats()["nonfinite_rows"]

    def _back(self, generation: int, *, drain: bool, repair: Repair | None) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Exchange back to a generation whose tensors are what was committed; it may need both in turn."""
        if self.active_generation == generation and not self._exchanging:
            return {}, ()
        try:
            exchange = self._exchange_back(generation, drain=drain)
        except PatchctlError:
            repaired = () if repair is None else repair(generation)
            if not repaired:
                raise
            return self._exchange_back(generation, drain=drain), repaired
        return exchange, () if repair is None else repair(generation)

    def _exchange_back(self, generation: int, *, drain: bool) -> dict[str, Any]:
        hard_stop_s = SWAP_S_MAX / 2 if drain else None
        message = Swap(generation, "drain" if drain else "auto", SWAP_S_MAX, hard_stop_s)
        give_up_s = time.monotonic() + SWAP_S_MAX
        while True:
            try:
                return self._exchange(message)
            except PatchctlError as error:
                # The engine goes back by itself from a generation that fails its probation: let it.
                if error.code != "engine.swap_pending" or time.monotonic() > give_up_s:
                    raise
            time.sleep(_LOOK_S)

    def _replace(self, lost: Mapping[Role, str], build: Stage) -> None:
        if any(self.processes.starts.values()) and not self._restarts.spend(time.monotonic()):
            raise _cannot_serve(lost, self._restarts.restarts_max + 1)
        self.processes.replace(tuple(lost), build)
        self.processes.attach()

    def _free_all_but(self, generation: int) -> None:
        """The front may hold what only the lost engine had: nobody will exchange to it."""
        for path in self.front_stats()["paths"]:
            if path["generation"] != generation:
                with suppress(PatchctlError):
                    self.processes.link("front").call(Release(path["generation"]))

    # -- a transaction's verbs

    def stage(self, generation: int, folder: Path, digest: str, *, commit_mode: CommitMode = "auto") -> dict[str, Any]:
        """Load a verified build in both processes, up to READY; frees it again if either refuses.

        The front goes first: its half is read in a moment, and an engine that refuses has changed nothing.
        """
        build = Stage(generation, str(folder), digest, commit_mode)
        front, engine = self.processes.link("front"), self.processes.link("engine")
        self._wait_for_room(front)
        front.call(build, STAGE_S_MAX)
        reach("host.stage.half", self.processes.pids)
        try:
            return engine.call(build, STAGE_S_MAX).data
        except PatchctlError:
            with suppress(PatchctlError):
                front.call(Release(generation))
            raise

    def _wait_for_room(self, front: ControlLink) -> None:
        """Wait until responses on a released request path have ended: at most two generations, ever."""
        give_up_s = time.monotonic() + _DRAIN_S_MAX
        while len(front.call(Stats()).data["paths"]) > 1 and time.monotonic() < give_up_s:
            time.sleep(5 * _LOOK_S)

    def swap(
        self,
        generation: int,
        *,
        policy: Policy = "auto",
        deadline_s: float = SWAP_S_MAX,
        hard_stop_after_s: float | None = None,
    ) -> dict[str, Any]:
        """Exchange at a step boundary and wait until the front follows; done already is done.

        The engine may go back by itself at once; then its own figures say so, and why.
        """
        front, engine = self.processes.link("front"), self.processes.link("engine")
        if all(path["generation"] != generation for path in front.call(Stats()).data["paths"]):
            # A front that was replaced meanwhile holds the committed build alone.
            raise _front_differs("the exchange was not asked for", f"the front does not hold generation {generation}")
        reach("host.swap.intent", self.processes.pids)
        data = self._exchange(Swap(generation, policy, deadline_s, hard_stop_after_s))
        reach("host.swap.exchanged", self.processes.pids)
        if self._front_follows(front, generation, unless_back=engine):
            self._took_over(generation)
        return data

    def _exchange(self, message: Swap) -> dict[str, Any]:
        self._exchanging = True
        try:
            return self.processes.link("engine").call(message, message.deadline_s + _REPLY_MARGIN_S).data
        except PatchctlError as error:
            # The engine ended a probation by itself, or the reply to the same request was lost.
            if error.code == "engine.already_active":
                return {}
            raise

    def _front_follows(self, front: ControlLink, generation: int, *, unless_back: ControlLink | None = None) -> bool:
        """Wait until the front serves ``generation``; False when the engine ``unless_back`` does not any more."""
        give_up_s = time.monotonic() + _FRONT_FOLLOWS_S_MAX
        while not _serves(front.call(Stats()).data, generation):
            if unless_back is not None and unless_back.call(Stats()).data["active_generation"] != generation:
                return False
            if time.monotonic() > give_up_s:
                why = f"it still runs another request path {_FRONT_FOLLOWS_S_MAX:.0f} s after the exchange"
                raise _front_differs("the front did not take over the new generation", why)
            time.sleep(_LOOK_S)
        return True

    def release(self, generation: int) -> None:
        """Free a generation that does not serve, in both processes."""
        try:
            self.processes.link("engine").call(Release(generation))
        finally:
            self.processes.link("front").call(Release(generation))

    # -- questions and orders that change no generation

    def inspect(self, generation: int) -> dict[str, Any]:
        """Digest of every named tensor of ``generation``, from live memory."""
        tensors: dict[str, Any] = self.processes.link("engine").call(Inspect(generation)).data["tensors"]
        return tensors

    def reclaim(self, message: Reclaim) -> dict[str, Any]:
        """Set the engine's reclaim hook, and run it when the message says now."""
        return self.processes.link("engine").call(message).data

    def arm(self) -> None:
        """Start, or extend to new regions, write tracking in both processes."""
        for role in ROLES:
            self.processes.link(role).call(Arm())

    def front_stats(self) -> dict[str, Any]:
        """The front's counters."""
        return self.processes.link("front").call(Stats()).data

    def engine_stats(self) -> dict[str, Any]:
        """The engine's counters; waits while the engine stages."""
        return self.processes.link("engine").call(Stats()).data

    def nonfinite_rows(self) -> int:
        """Rows of non-finite logits since the serving generation took over."""
        rows: int = self.engine_stats()["nonfinite_rows"]
        return rows - self._nonfinite_rows_before

    def close(self) -> None:
        """End both processes for good, also those that are being started."""
        self.processes.give_up_loading()
        with self._lock:
            self.processes.close()


def _serves(front: dict[str, Any], generation: int) -> bool:
    return bool(front["engine_up"]) and front["active_generation"] == generation


def _front_differs(what: str, why: str) -> PatchctlError:
    return PatchctlError(
        code="front.did_not_follow",
        what=what,
        why=why,
        serving="the last committed build, after the way back that follows",
        next_command="patchctl status",
    )


def _cannot_serve(lost: Mapping[Role, str], times: int) -> PatchctlError:
    last = ", ".join(f"{role}: {why}" for role, why in lost.items())
    return PatchctlError(
        code="host.cannot_serve",
        what="the engine host stopped",
        why=f"a process was lost {times} times within {RESTART_WINDOW_S:.0f} s; last {last}",
        exit_code=ExitCode.ROLLBACK_INCOMPLETE,
        serving="nothing from this host: take it out of rotation",
        next_command="patchctl history; then patchctl engine serve …",
    )
