"""The serve loop: the one thread that owns the device.

Each turn is one step of the serving generation and then a step boundary, where a pending swap may be
carried out; beside the step, a generation that has to rebuild KV takes one of its own. Everything the
loop owns (schedule, arenas, active generation) is touched by its thread only; other threads post
messages and calls, taken between steps.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from engine.exchange import Action, Boundary, decide, hold_admission
from engine.generation import Generation
from engine.kv import KvArena
from engine.metrics import Metrics
from engine.pending import PendingSwap
from engine.sampler import Choice, sample
from engine.schedule import Schedule, Sequence, StepPlan
from engine.wire import Cancel, Exchanged, Reply, Submit, ToEngine, ToFront, Token, Tokens

_SEED_BITS = 64
_MS, _US = 1e3, 1e6
_STOPPING = Reply("stopping", "the engine is stopping")


class ServeLoop:
    """Runs until :meth:`stop`.

    Args:
        send: delivers a message to the front, in order; raises OSError when the front is gone.
    """

    def __init__(self, send: Callable[[ToFront], None]) -> None:
        self.metrics = Metrics()
        self._send = send
        self._wake = threading.Condition()
        self._inbox: deque[ToEngine] = deque()
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._stopping = False
        self._schedule = Schedule()
        self._active: Generation | None = None
        self._arenas: dict[int, KvArena] = {}
        self._pending: PendingSwap | None = None
        self._tokens_sent_s: float | None = None
        self._gap_from_s: float | None = None
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    # Called by other threads.

    @property
    def running(self) -> int:
        """Sequences in slots."""
        return len(self._schedule.running)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._schedule.waiting) + len(self._inbox)

    def post(self, message: ToEngine) -> None:
        """Hand over a message of the front."""
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def activate(self, generation: Generation) -> Future[None]:
        """Serve the first generation."""

        def activate() -> None:
            assert self._active is None
            self._arenas[generation.arena.serial] = generation.arena
            self._active = generation

        return self._call(activate)

    def request_swap(self, pending: PendingSwap) -> None:
        """Exchange at the next boundary that allows it; ``pending.reply`` tells the outcome."""

        def request() -> None:
            assert self._pending is None
            self._arenas[pending.target.arena.serial] = pending.target.arena
            self._pending = pending

        def give_up(call: Future[None]) -> None:
            if call.cancelled():
                pending.reply.set_result(_STOPPING)

        self._call(request).add_done_callback(give_up)

    def detach(self, generation: Generation) -> Future[None]:
        """Let go of a generation that does not serve; done when no step can touch it any more."""

        def detach() -> None:
            assert self._active is not None
            if generation.arena is not self._active.arena:
                self._arenas.pop(generation.arena.serial, None)

        return self._call(detach)

    def drop_requests(self) -> Future[None]:
        """Cancel everything: the front is gone."""

        def drop() -> None:
            self._inbox.clear()
            for sequence in (*self._schedule.waiting, *self._schedule.running):
                self._schedule.cancel(sequence.request)
                self.metrics.requests_cancelled += 1

        return self._call(drop)

    def stop(self) -> None:
        """End after the present step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _call(self, function: Callable[[], None]) -> Future[None]:
        """Run ``function`` in the loop's thread between two steps; cancelled when the loop ends first."""
        done: Future[None] = Future()
        with self._wake:
            if self._stopping:
                done.cancel()
            else:
                self._calls.append((function, done))
                self._wake.notify()
        return done

    # The loop's own thread.

    def run(self) -> None:
        """Serve until stopped. An exception here is a defect: the process must end."""
        torch.set_grad_enabled(False)  # per thread
        try:
            while self._wait_for_work():
                self._take_calls()
                if self._active is not None:
                    self._turn(self._active)
        finally:
            self.stop()
            self._helper.shutdown()
            for _, done in self._calls:
                done.cancel()
            if self._pending is not None:
                self._pending.reply.set_result(_STOPPING)

    def _take_calls(self) -> None:
        # A method of its own: a local of `run` would keep the last call's generation alive.
        for _ in range(len(self._calls)):
            function, done = self._calls.popleft()
            function()
            done.set_result(None)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._calls or (self._active is not None and self._busy())):
                self._wake.wait()
        return not self._stopping

    def _busy(self) -> bool:
        return bool(self._inbox or self._schedule.running or self._schedule.waiting or self._pending)

    def _turn(self, active: Generation) -> None:
        """One step and its boundary."""
        start_s = time.perf_counter()
        tokens = self._intake()
        self._sweep(active)
        tokens += self._admit(active)
        plan = self._schedule.plan(active.arena.serial, chunk_tokens_max=active.chunk_tokens_max)
        if plan is not None:
            tokens += self._step(active, plan)
        self._sweep(active)
        self._deliver(active, tokens)
        if self._pending is not None:
            self._boundary(active, self._pending)
        if plan is not None:
            self.metrics.step.add((time.perf_counter() - start_s) * _MS)

    def _intake(self) -> list[Token]:
        """Take the front's messages; returns the ends they cause."""
        ended = []
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Cancel):
                token = self._schedule.cancel(message.request)
                ended += [] if token is None else [token]
            elif not self._schedule.submit(_sequence(message)):
                # The id belongs to a live request, so no answer can reach the right one.
                self.metrics.requests_failed += 1
        return ended

    def _admit(self, active: Generation) -> list[Token]:
        limits, pending = active.build.limits, self._pending
        if pending is not None:
            if hold_admission(pending.mode, pending.ahead_steps):
                return []
            limits = replace(limits, slots=min(limits.slots, pending.target.build.limits.slots))
        return self._schedule.admit(limits)

    def _step(self, active: Generation, plan: StepPlan) -> list[Token]:
        rebuilt = self._start_ahead(active)
        logits = active.run(plan)
        if rebuilt is not None:
            rebuilt.result()
        self._schedule.consume(active.arena.serial, plan)
        self.metrics.steps += 1
        if logits is None:
            return []
        slots = [feed.slot for feed in plan.feeds if feed.emits]
        sequences = [self._schedule.running[slot] for slot in slots]
        choices = [Choice(sequence.sampling, sequence.seed, sequence.generated) for sequence in sequences]
        tokens = []
        for slot, picked in zip(slots, sample(logits, choices), strict=True):
            if picked is None:
                self.metrics.nonfinite_rows += 1
                self._clear(active, slot)
            tokens.append(self._schedule.emit(slot, picked, active.build.limits))
        return tokens

    def _start_ahead(self, active: Generation) -> Future[None] | None:
        """Let a pending generation rebuild KV beside this step, in another thread: the arenas are disjoint."""
        pending = self._pending
        if pending is None or self._decide(active, pending) is not Action.AHEAD:
            return None
        target = pending.target
        plan = self._schedule.plan_ahead(target.arena.serial, chunk_tokens_max=target.chunk_tokens_max)
        assert plan is not None
        pending.ahead_steps += 1
        return self._helper.submit(self._rebuild, target, plan)

    def _rebuild(self, target: Generation, plan: StepPlan) -> None:
        target.run(plan)
        self._schedule.consume(target.arena.serial, plan)

    def _sweep(self, active: Generation) -> None:
        """Close holes in every arena that knows the sequences: also the one a rollback would return to."""
        moves = self._schedule.sweep()
        if not moves:
            return
        with active.backend.stream():
            for move in moves:
                for serial, arena in self._arenas.items():
                    arena.move(move.source, move.target, move.cached.get(serial, 0))
            active.backend.wait()

    def _clear(self, active: Generation, slot: int) -> None:
        with active.backend.stream():
            for arena in self._arenas.values():
                arena.clear(slot)
            active.backend.wait()

    def _deliver(self, active: Generation, tokens: list[Token]) -> None:
        if not tokens:
            return
        for token in tokens:
            self.metrics.tokens_generated += token.token >= 0
            self.metrics.requests_completed += token.finish in ("stop", "length")
            self.metrics.requests_failed += token.finish == "error"
            self.metrics.requests_cancelled += token.finish == "cancelled"
        self._tell(Tokens(active.number, tuple(tokens)))
        self._tokens_sent_s = time.perf_counter()
        if self._gap_from_s is not None:
            self.metrics.swap_gap_ms_last = (self._tokens_sent_s - self._gap_from_s) * _MS
            self._gap_from_s = None

    def _tell(self, message: ToFront) -> None:
        try:
            self._send(message)
        except OSError:
            # The reader thread sees the end of the stream as well, and drops all requests.
            return

    def _boundary(self, active: Generation, pending: PendingSwap) -> None:
        """Exchange, give up, or go on waiting."""
        action = self._decide(active, pending)
        if action is Action.CATCH_UP:
            target = pending.target
            plan = self._schedule.plan_ahead(target.arena.serial, chunk_tokens_max=target.chunk_tokens_max)
            assert plan is not None
            assert plan.chunk is None
            self._rebuild(target, plan)
            action = Action.EXCHANGE
        if action is Action.MISS:
            self._pending = None
            pending.missed()
            pending.reply.set_result(Reply("boundary_missed", "no step boundary allowed the swap in time"))
        elif action is Action.EXCHANGE:
            self._exchange(active, pending)

    def _decide(self, active: Generation, pending: PendingSwap) -> Action:
        target, rebuilds = pending.target, pending.mode == "recompute" and pending.target.arena is not active.arena
        boundary = Boundary(
            running=len(self._schedule.running),
            behind=self._schedule.lag_max(target.arena.serial) - 1 if rebuilds else 0,
            fits=self._schedule.fits(target.build.limits, active.build.config.vocab_size),
            late=time.monotonic() >= pending.deadline_s,
        )
        return decide(pending.mode, boundary)

    def _exchange(self, active: Generation, pending: PendingSwap) -> None:
        start_s = time.perf_counter()
        self._active = pending.target
        exchange_us = (time.perf_counter() - start_s) * _US
        self._pending = None
        pending.exchanged()
        self._tell(Exchanged(pending.target.number))
        if pending.mode == "recompute" and pending.target.arena is active.arena:
            self._schedule.forget(active.arena.serial)
        self._gap_from_s = self._tokens_sent_s if self._schedule.running else None
        self.metrics.swaps += 1
        self.metrics.exchange_us_last = exchange_us
        self.metrics.boundary_wait_ms_last = (time.monotonic() - pending.requested_s) * _MS
        data = {
            "mode": pending.mode,
            "exchange_us": exchange_us,
            "boundary_wait_ms": self.metrics.boundary_wait_ms_last,
            "running": len(self._schedule.running),
            "ahead_steps": pending.ahead_steps,
        }
        pending.reply.set_result(Reply(data=data))


def _sequence(submit: Submit) -> Sequence:
    seed = submit.sampling.seed
    return Sequence(
        request=submit.request,
        tokens=list(submit.prompt),
        tokens_max=submit.tokens_max,
        sampling=submit.sampling,
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        stop_tokens=frozenset(submit.stop_tokens),
    )
