"""Carries out control messages: stage, swap, release, inspect, restore, stats, arm, reclaim.

Refusals are decided when a message arrives; what takes long runs in one niced worker thread, so that
staging and inspecting give way to serving. Replies are futures: the process sends them in the order of
the messages. On probation the controller also acts by itself: after a breach it exchanges back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import torch

from engine import collector
from engine.bucket import all_buckets
from engine.errors import AbandonedError, SwapRefusedError
from engine.exchange import Policy
from engine.generation import Generation
from engine.governed import Governor, manifest_of
from engine.graphs.port import GraphBackend
from engine.graphs.select import new_backend
from engine.inspection import DigestTensors, inspect_tensors
from engine.loop import ServeLoop
from engine.memory import ReadMemory, memory_reader
from engine.pending import PendingSwap, resolve_mode
from engine.probation import Breach
from engine.reaper import Reaper
from engine.reclaiming import reclaim
from engine.replies import refusal, settled
from engine.restoring import Restorer
from engine.servable import WayBack
from engine.stage import stage
from engine.stats import engine_stats, stage_figures
from engine.swap import STAGING, Event, State, SwapMachine
from engine.watch import StepWatch
from engine.wire import Arm, Control, Inspect, Reclaim, Release, Reply, Restore, Stage, Stats, Stop, Swap
from engine.worker import control_worker

__all__ = ["ArmHook", "Controller", "DigestTensors"]

ArmHook = Callable[[], dict[str, Any]]
MakeBackend = Callable[[torch.device], GraphBackend]

# Between two pieces of staging work, so that a waiting serve loop gets the interpreter lock first.
_YIELD_S = 0.001
# An exchange back that nobody asked for: as long as a recompute of full sequences takes. When it is missed
# it is asked for again.
_BREACH_DEADLINE_S = 30.0
# When only draining can go back (another vocabulary), a bad build is not served for longer than this.
_BREACH_HARD_STOP_S = 5.0
_log = logging.getLogger(__name__)


class Controller:
    """Owns the swap machine and the resident generations.

    Args:
        loop: the serve loop, not running yet.
        device: where generations run.
        arm: starts write tracking of this process.
        digest_tensors: digests named byte arrays.
        make_backend: makes the graph backend of a generation.
        read_memory: a look at memory in use; the device's own by default.

    Raises:
        MemoryUnreadableError: the system does not tell how much memory there is.
    """

    def __init__(
        self,
        loop: ServeLoop,
        *,
        device: torch.device,
        arm: ArmHook,
        digest_tensors: DigestTensors,
        make_backend: MakeBackend = new_backend,
        read_memory: ReadMemory | None = None,
    ) -> None:
        self._loop = loop
        self._device = device
        self._arm = arm
        self._digest_tensors = digest_tensors
        self._restorer = Restorer(loop, digest_tensors)
        self._make_backend = make_backend
        self._lock = threading.Lock()
        self._machine = SwapMachine.empty()
        self._reaper = Reaper()
        self._digests: dict[int, str] = {}
        self._generations: dict[int, Generation] = {}
        self._last_breach = ""
        self._stopping = False
        self._worker = control_worker()
        self._read_memory = memory_reader(device) if read_memory is None else read_memory
        self._watch = StepWatch(
            loop,
            read_memory=self._read_memory,
            blocks_for=self._blocks_for,
            breached=self._breached,
            fallback=self._fallback,
        )
        self._governor = Governor(device.type, self._read_memory, self._watch.free)
        loop.observe(self._watch)

    def handle(self, message: Control) -> Future[Reply]:
        """Begin to carry out ``message``; never raises."""
        try:
            with self._lock:
                return self._dispatch(message)
        except Exception as error:
            # A trust boundary: whatever goes wrong is the answer, and serving goes on.
            return settled(refusal(error))

    def close(self) -> None:
        """Abandon staging, wait for the worker, free all generations; the loop has ended."""
        self._stopping = True
        self._worker.shutdown(cancel_futures=True)
        self._machine.crash()
        for generation in self._generations.values():
            generation.close()
        self._generations.clear()

    def _dispatch(self, message: Control) -> Future[Reply]:
        match message:
            case Stage():
                future = self._work(self._begin(message))
            case Swap():
                future = self._swap(message)
            case Release():
                future = self._begin_release(message.generation)
            case Inspect():
                future = self._pinned(message.generation, self._inspect)
            case Restore():
                future = self._pinned(message.generation, lambda one: self._restore(one, message))
            case Arm():
                future = self._work(lambda: Reply(data=self._arm()))
            case Reclaim():
                active = None if self._machine.active is None else self._generations[self._machine.active]
                capacity = 0 if active is None else active.pool.blocks.capacity
                future = reclaim(message, self._loop, self._watch, capacity)
            case Stats():
                future = settled(Reply(data=self._stats()))
            case Stop():
                future = settled(Reply())
        return future

    def _work(self, job: Callable[[], Reply]) -> Future[Reply]:
        def guarded() -> Reply:
            try:
                return job()
            except Exception as error:
                return refusal(error)

        return self._worker.submit(guarded)

    # Stage.

    def _begin(self, message: Stage) -> Callable[[], Reply]:
        self._machine.begin(message.generation)
        known = {number: self._digests.get(number, "") for number in self._machine.states}
        self._digests = known | {message.generation: message.digest}
        return lambda: self._stage(message)

    def _stage(self, message: Stage) -> Reply:
        number = message.generation
        try:
            with collector.paused():
                return self._load(message)
        except Exception as error:
            with self._lock:
                if self._machine.states[number] is State.RETIRING and number not in self._generations:
                    self._machine.apply(number, Event.FREED)
                    raise AbandonedError(f"generation {number} was released while it was being staged") from error
                if number not in self._generations:
                    self._machine.fail(number)
            raise

    def _load(self, message: Stage) -> Reply:
        number, folder = message.generation, Path(message.folder)
        self._checkpoint(number)
        with self._lock:
            active = None if self._machine.active is None else self._generations[self._machine.active]
        manifest = manifest_of(folder, message.digest)
        plan = self._governor.allow(manifest, active, message.commit_mode)
        with self._lock:
            self._machine.choose_mode(number, plan.commit_mode)
        captured = all_buckets(manifest.runtime)

        def report(event: Event, buckets: Iterable[Hashable] = ()) -> None:
            with self._lock:
                self._machine.apply(number, event, captured if event is Event.LOADED else buckets)

        generation, figures = stage(
            number,
            folder,
            message.digest,
            device=self._device,
            active=active,
            report=report,
            checkpoint=lambda: self._checkpoint(number),
            commit_mode=plan.commit_mode,
            make_backend=self._make_backend,
        )
        with self._lock:
            self._generations[number] = generation
            if active is None:
                self._machine.activate_first(number)
        if active is None:
            self._loop.activate(generation).result()
        return Reply(data=stage_figures(generation, figures, plan))

    def _checkpoint(self, number: int) -> None:
        if self._stopping:
            raise CancelledError
        if self._machine.states.get(number) not in STAGING:
            raise AbandonedError
        time.sleep(_YIELD_S)

    # Swap, and the ways back.

    def _swap(self, message: Swap) -> Future[Reply]:
        number = message.generation
        if number == self._machine.active and self._machine.breached:
            # What a rollback asks for happened by itself, after a breach.
            return settled(self._back(number))
        pending = self._request(number, message.policy, message.deadline_s, message.hard_stop_after_s)
        reply: Future[Reply] = Future()

        def answer(done: Future[Reply]) -> None:
            missed = not done.result().ok and self._machine.active == number
            reply.set_result(self._back(number) if missed else done.result())

        pending.reply.add_done_callback(answer)
        return reply

    def _back(self, number: int) -> Reply:
        return Reply(data={"mode": "fallback", "breach": self._last_breach, "active": number})

    def _request(self, number: int, policy: Policy, deadline_s: float, hard_stop_s: float | None) -> PendingSwap:
        self._machine.request(number)
        try:
            assert self._machine.active is not None
            target = self._generations[number]
            mode, ahead = resolve_mode(policy, self._generations[self._machine.active], target)
        except Exception:
            self._machine.miss()
            raise
        now_s = time.monotonic()
        pending = PendingSwap(
            target,
            mode,
            ahead,
            requested_s=now_s,
            deadline_s=now_s + deadline_s,
            hard_stop_s=None if hard_stop_s is None else now_s + hard_stop_s,
            exchanged=self._exchanged,
            missed=self._missed,
        )
        self._loop.request_swap(pending)
        return pending

    def _exchanged(self) -> None:
        with self._lock:
            self._machine.exchange()
            target = self._machine.rollback_target
        self._reaper.protect(target)
        if target is None:
            self._watch.probation.end(committed=False)
        else:
            self._last_breach = ""
            self._watch.probation.begin()

    def _missed(self) -> None:
        with self._lock:
            # Not pending any more when a fallback came first: that was its outcome.
            if self._machine.pending is not None:
                self._machine.miss()

    def _breached(self, breach: Breach) -> None:
        """In the loop's thread, as long as the bad generation serves: see that an exchange back is pending."""
        with self._lock:
            target = self._machine.breach(breach.what)
            if target is None or self._machine.pending is not None:
                return
            self._last_breach = f"{breach.rule}: {breach.what}"
            _log.error("generation %s goes back: %s", self._machine.active, self._last_breach)
            try:
                self._request(target, "auto", _BREACH_DEADLINE_S, None)
            except SwapRefusedError:
                # Another vocabulary: nothing but draining can go back.
                self._request(target, "drain", _BREACH_DEADLINE_S, _BREACH_HARD_STOP_S)

    def _fallback(self, number: int, why: str) -> WayBack | None:
        """In the loop's thread: ``number`` cannot go on; the committed generation serves from now on."""
        with self._lock:
            target = self._machine.breach(why)
            if target is None:
                return None
            self._machine.fall_back()
            self._last_breach = why
            generation, before = self._generations[number], self._generations[target]
        _log.error("generation %d was replaced by %d at once: %s", number, target, why)
        self._reaper.protect(None)
        self._watch.probation.end(committed=False)
        return WayBack(before, carries=before.carries(generation))

    # Release.

    def _begin_release(self, number: int) -> Future[Reply]:
        commits = number == self._machine.committed
        if self._machine.release(number) in STAGING:
            # The worker frees what it has loaded so far, and then comes to this.
            return self._work(lambda: Reply(data={"abandoned": True}))
        if commits:
            self._reaper.protect(None)
            self._loop.call(lambda: self._watch.probation.end(committed=True))
        return self._work(lambda: self._release(number))

    def _release(self, number: int) -> Reply:
        generation = self._generations[number]
        self._loop.detach(generation).result()
        # No step of it begins any more; on a device one may still be under way.
        epoch, launch = self._reaper.launched(number), generation.graphs.backend.launched()
        self._reaper.retire(number)
        while not launch.done():
            if self._stopping:
                raise CancelledError
            time.sleep(_YIELD_S)
        self._reaper.completed(epoch)
        self._reaper.freed(number)
        with self._lock:
            del self._generations[number]
        generation.close()
        with self._lock:
            self._machine.apply(number, Event.FREED)
        return Reply()

    # Inspect, restore, reclaim, stats.

    def _pinned(self, number: int, job: Callable[[Generation], Reply]) -> Future[Reply]:
        """Work on a generation that stays as it is meanwhile."""
        generation = self._generations.get(number)
        if generation is None or self._machine.states.get(number) is State.RETIRING:
            raise SwapRefusedError("not_ready", f"generation {number} is not resident")
        self._reaper.pin(number)

        def pinned() -> Reply:
            try:
                return job(generation)
            finally:
                self._reaper.unpin(number)

        return self._work(pinned)

    def _inspect(self, generation: Generation) -> Reply:
        return Reply(data={"tensors": inspect_tensors(generation, self._digest_tensors)})

    def _restore(self, generation: Generation, message: Restore) -> Reply:
        return self._restorer.restore(generation, message, tuple(self._generations.values()))

    def _blocks_for(self, size_bytes: int) -> int:
        active = self._loop.active
        return -(-size_bytes // active.pool.block_bytes) if isinstance(active, Generation) else 0

    def _stats(self) -> dict[str, Any]:
        memory = self._read_memory()
        return {
            **engine_stats(self._loop, self._machine, self._generations, self._digests),
            **self._watch.reclaim.as_dict(),
            **self._governor.last,
            "memory_used_bytes": memory.used_bytes,
            "memory_total_bytes": memory.total_bytes,
            "memory_limit_bytes": memory.limit_bytes,
            "probation": self._watch.probation.running,
            "probation_breach": self._last_breach,
        }
