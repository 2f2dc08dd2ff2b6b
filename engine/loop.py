"""The serve loop: the one thread that owns the device.

Each turn is one step of the serving generation and then a step boundary, where a pending swap may be
carried out; beside the step, a generation that has to rebuild KV takes one of its own. Everything the
loop owns (schedule, KV blocks, active generation) is touched by its thread only; other threads post
messages and calls, taken between steps.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import msgspec
import torch

from engine.exchange import Action, Boundary, decide, hold_admission
from engine.mailbox import Mailbox
from engine.metrics import Metrics
from engine.outbox import Outbox, Send
from engine.pending import PendingSwap
from engine.sampler import Choice, Sampled, sample
from engine.schedule import Schedule, Sequence, StepPlan
from engine.servable import Servable, StepFacts, StepObserver, WayBack
from engine.wire import Admitted, Cancel, Exchanged, Reply, Submit, ToEngine, Token

_SEED_BITS = 64
_MS, _US = 1e3, 1e6
_STOPPING = Reply("stopping", "the engine is stopping")
_log = logging.getLogger(__name__)


class ServeLoop:
    """Runs until :meth:`stop`."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.schedule = Schedule()
        self._observer: StepObserver | None = None
        self._mailbox = Mailbox()
        self._outbox = Outbox(self.metrics)
        self._active: Servable | None = None
        self._pending: PendingSwap | None = None
        self._way_back: WayBack | None = None
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    # Called by other threads.

    @property
    def active(self) -> Servable | None:
        """The generation that serves."""
        return self._active

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self.schedule.running)

    @property
    def waiting(self) -> int:
        """Requests not in the batch."""
        return len(self.schedule.waiting) + len(self._mailbox)

    def observe(self, observer: StepObserver) -> None:
        """Tell ``observer`` of every step, and ask it for a way back; set before the loop runs."""
        self._observer = observer

    def post(self, message: ToEngine) -> None:
        """Hand over a message of the front."""
        self._mailbox.post(message)

    def attach(self, send: Send) -> Future[None]:
        """Talk to a new front: drop the requests of the one before and tell which generation serves.

        Nothing of the front before is posted any more.

        Args:
            send: delivers a message to the front, in order; raises OSError when the front is gone.
        """

        def attach() -> None:
            self._drop_requests()
            self._outbox.attach(send)
            if self._active is not None:
                self._outbox.tell(Exchanged(self._active.number))

        return self.call(attach)

    def activate(self, generation: Servable) -> Future[None]:
        """Serve the first generation."""

        def activate() -> None:
            assert self._active is None
            self._active = generation
            self._outbox.tell(Exchanged(generation.number))

        return self.call(activate)

    def request_swap(self, pending: PendingSwap) -> None:
        """Exchange at the next boundary that allows it; ``pending.reply`` tells the outcome."""

        def request() -> None:
            assert self._pending is None
            self._pending = pending

        def give_up(call: Future[None]) -> None:
            if call.cancelled():
                pending.reply.set_result(_STOPPING)

        self.call(request).add_done_callback(give_up)

    def detach(self, generation: Servable) -> Future[None]:
        """Let go of a generation that does not serve; done when no step can touch it any more."""

        def detach() -> None:
            self.schedule.drop(generation.number)
            generation.space.pool.forget(generation.number)

        return self.call(detach)

    def reclaim(self, blocks_max: int) -> Future[int]:
        """Evict up to ``blocks_max`` blocks kept for their prefix alone and give free memory back, at a boundary.

        The result is in bytes.
        """
        freed: Future[int] = Future()

        def reclaim() -> None:
            if self._active is None:
                freed.set_result(0)
                return
            self._active.space.pool.evict(blocks_max)
            freed.set_result(self._active.give_back())

        self.call(reclaim).add_done_callback(lambda call: freed.cancel() if call.cancelled() else None)
        return freed

    def drop_requests(self) -> Future[None]:
        """Cancel everything: the front is gone."""
        return self.call(self._drop_requests)

    def stop(self) -> None:
        """End after the present step."""
        self._mailbox.close()

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Run ``function`` in the loop's thread between two steps; cancelled when the loop ends first."""
        return self._mailbox.call(function)

    # The loop's own thread.

    def run(self) -> None:
        """Serve until stopped. An exception here is a defect: the process must end."""
        torch.set_grad_enabled(False)  # per thread
        try:
            while self._mailbox.wait(busy=self._busy):
                self.turn()
        finally:
            self.stop()
            self._helper.shutdown()
            self._mailbox.cancel_calls()
            if self._pending is not None:
                self._pending.reply.set_result(_STOPPING)

    def turn(self) -> None:
        """Calls that wait, one step and its boundary; for :meth:`run`, and for simulations without threads."""
        self._mailbox.run_calls()
        if self._active is not None:
            self._serve(self._active)

    def _busy(self) -> bool:
        if self._active is None:
            return False
        return bool(len(self._mailbox) or self.schedule.running or self.schedule.waiting or self._pending)

    def _serve(self, active: Servable) -> None:
        start_s = time.perf_counter()
        tokens = self._intake()
        self.schedule.sweep()
        tokens += self._admit(active)
        plan = self.schedule.plan(active.space, chunk_tokens_max=active.chunk_tokens_max)
        nonfinite = 0
        if plan is not None:
            emitted, nonfinite = self._try_step(active, plan)
            tokens += emitted
        self.schedule.sweep()
        self._outbox.deliver(active.number, tokens)
        if self._way_back is not None:
            self._return(active, self._way_back)
        elif self._pending is not None:
            self._boundary(active, self._pending)
        if plan is not None:
            step_ms = (time.perf_counter() - start_s) * _MS
            self.metrics.step.add(step_ms)
            if self._observer is not None:
                facts = StepFacts(active.number, step_ms, len(plan.decode), plan.chunk is not None, nonfinite)
                self._observer.stepped(facts)
        self._outbox.tell_load(self.schedule, active.space, self.waiting)

    def _intake(self) -> list[Token]:
        """Take the front's messages; returns the ends they cause."""
        ended = []
        for message in self._mailbox.messages():
            if isinstance(message, Cancel):
                token = self.schedule.cancel(message.request)
                ended += [] if token is None else [token]
            elif not self.schedule.submit(_sequence(message)):
                # The id belongs to a live request, so no answer can reach the right one.
                self.metrics.requests_failed += 1
        return ended

    def _admit(self, active: Servable) -> list[Token]:
        limits, pending = active.limits, self._pending
        if pending is not None:
            if hold_admission(pending.mode, pending.ahead_steps):
                return []
            limits = replace(limits, slots=min(limits.slots, pending.target.limits.slots))
        admitted, ended = self.schedule.admit(limits, active.space)
        for sequence in admitted:
            # A sequence that comes back from preemption was announced before.
            if not sequence.generated:
                self._outbox.tell(Admitted(sequence.request, sequence.prefix_tokens))
        return ended

    def _try_step(self, active: Servable, plan: StepPlan) -> tuple[list[Token], int]:
        """Run a step; when it fails, go back to the generation before."""
        try:
            return self._step(active, plan)
        except Exception as error:
            # The plan was not consumed: another generation can compute the same step again.
            _log.exception("a step of generation %d failed", active.number)
            if not self._seek_way_back(active, f"a step failed: {error}"):
                raise
            self.schedule.abandon(active.number, plan)
            return [], 0

    def _step(self, active: Servable, plan: StepPlan) -> tuple[list[Token], int]:
        """Run a step; returns its tokens and how many rows were not finite."""
        rebuilt = self._start_ahead(plan)
        try:
            logits = active.run(plan)
        finally:
            if rebuilt is not None:
                self._end_ahead(rebuilt)
        self.metrics.steps += 1
        sequences = [feed.sequence for feed in plan.feeds if feed.emits]
        choices = [Choice(one.sampling, one.seed, one.generated, one.tokens) for one in sequences]
        sampled = [] if logits is None else sample(logits, choices)
        broken = [one for one, choice in zip(sequences, sampled, strict=True) if choice.token is None]
        self.metrics.nonfinite_rows += len(broken)
        if broken and self._seek_way_back(active, "logits are not finite"):
            # Nothing of this step counts, and what the broken sequences have cached is not to be trusted.
            for sequence in broken:
                self.schedule.distrust(sequence, active.number)
            return [], len(broken)
        self.schedule.consume(active.number, plan)
        return [self._emit(active, *pair) for pair in zip(sequences, sampled, strict=True)], len(broken)

    def _emit(self, active: Servable, sequence: Sequence, sampled: Sampled) -> Token:
        if sampled.token is None:
            self.schedule.distrust(sequence, active.number)
            return self.schedule.fail(sequence)
        token = self.schedule.emit(sequence, sampled.token, active.limits)
        return token if sampled.logprobs is None else msgspec.structs.replace(token, logprobs=sampled.logprobs)

    def _seek_way_back(self, active: Servable, why: str) -> bool:
        """Remember what to serve instead from this boundary on; False when there is nothing."""
        if self._observer is not None:
            self._way_back = self._observer.fallback(active.number, why)
        return self._way_back is not None

    def _return(self, active: Servable, way_back: WayBack) -> None:
        """Serve the generation before; what its KV lacks is computed in the next steps."""
        self._way_back = None
        if self._pending is not None:
            self._give_up(self._pending, Reply("boundary_missed", f"generation {active.number} cannot go on"))
        way_back.generation.install()
        if way_back.carries:
            self.schedule.carry(active.number, way_back.generation.number)
        self._active = way_back.generation
        self.metrics.fallbacks += 1
        self._outbox.tell(Exchanged(way_back.generation.number))

    # Rebuilding KV ahead.

    def _start_ahead(self, plan: StepPlan) -> Future[None] | None:
        """Let a pending generation rebuild KV beside this step, in another thread: their blocks are disjoint."""
        pending = self._pending
        if pending is None or not pending.ahead or not self._fits(pending):
            return None
        target = pending.target
        ahead = self.schedule.plan_ahead(plan, target.space, chunk_tokens_max=target.chunk_tokens_max)
        pending.ahead_steps += 1
        return None if ahead is None else self._helper.submit(self._rebuild, target, ahead)

    def _rebuild(self, target: Servable, plan: StepPlan) -> None:
        target.run(plan)
        self.schedule.consume(target.number, plan)

    def _end_ahead(self, rebuilt: Future[None]) -> None:
        """Wait for the rebuilding; if it failed, the swap is off and serving goes on."""
        error = rebuilt.exception()
        if error is None:
            return
        assert self._pending is not None
        _log.error("the pending generation failed", exc_info=error)
        why = f"generation {self._pending.target.number} failed before it served: {error}"
        self._give_up(self._pending, Reply("target_failed", why))

    def _drop_requests(self) -> None:
        self._mailbox.discard()
        for sequence in self.schedule:
            if self.schedule.cancel(sequence.request) is not None:
                self.metrics.requests_cancelled += 1
        self.schedule.sweep()

    # The boundary.

    def _fits(self, pending: PendingSwap) -> bool:
        assert self._active is not None
        return self.schedule.fits(pending.target.limits, self._active.limits.vocab_size)

    def _boundary(self, active: Servable, pending: PendingSwap) -> None:
        """Exchange, give up, or go on waiting."""
        now_s = time.monotonic()
        boundary = Boundary(
            running=len(self.schedule.running),
            behind=self.schedule.behind(pending.target.number, active.number) if pending.ahead else 0,
            fits=self._fits(pending),
            late=now_s >= pending.deadline_s,
            hard_stop=pending.hard_stop_s is not None and now_s >= pending.hard_stop_s,
        )
        action = decide(pending.mode, boundary)
        if action is Action.HARD_STOP:
            ended = [self.schedule.cancel(sequence.request) for sequence in tuple(self.schedule.running)]
            self._outbox.deliver(active.number, [token for token in ended if token is not None])
            self.schedule.sweep()
            action = Action.EXCHANGE
        if action is Action.MISS:
            self._give_up(pending, Reply("boundary_missed", "no step boundary allowed the swap in time"))
        elif action is Action.EXCHANGE:
            self._exchange(active, pending)

    def _give_up(self, pending: PendingSwap, reply: Reply) -> None:
        """Forget the swap; its target is merely READY again."""
        self._pending = None
        self.schedule.drop(pending.target.number)
        pending.missed()
        pending.reply.set_result(reply)

    def _exchange(self, active: Servable, pending: PendingSwap) -> None:
        start_s = time.perf_counter()
        try:
            pending.target.install()
        except Exception as error:
            # Half copied: nobody can serve until the old weights are back, so failing again is fatal.
            _log.exception("generation %d could not be installed", pending.target.number)
            active.install()
            self._give_up(pending, Reply("target_failed", f"its weights could not be copied into place: {error}"))
            return
        installed_s = time.perf_counter()
        if pending.mode == "carry":
            self.schedule.carry(active.number, pending.target.number)
        self._active = pending.target
        exchange_us = (time.perf_counter() - installed_s) * _US
        self._pending = None
        pending.exchanged()
        self._outbox.tell(Exchanged(pending.target.number))
        self._outbox.begin_gap(running=bool(self.schedule.running))
        self.metrics.swaps += 1
        self.metrics.exchange_us_last = exchange_us
        self.metrics.boundary_wait_ms_last = (time.monotonic() - pending.requested_s) * _MS
        data = {
            "mode": pending.mode,
            "exchange_us": exchange_us,
            "copy_ms": (installed_s - start_s) * _MS,
            "boundary_wait_ms": self.metrics.boundary_wait_ms_last,
            "running": len(self.schedule.running),
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
