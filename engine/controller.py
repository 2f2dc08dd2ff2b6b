"""Carries out control messages: stage, swap, release, inspect, stats, arm.

Refusals are decided when a message arrives; what takes long runs in one niced worker thread, so that
staging and inspecting give way to serving. Replies are futures: the process sends them in the order of
the messages.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine import collector
from engine.errors import EngineError, SwapRefusedError
from engine.exchange import resolve
from engine.generation import Generation
from engine.loop import ServeLoop
from engine.pending import PendingSwap
from engine.stage import stage
from engine.swap import Event, SwapMachine
from engine.wire import Arm, Control, Inspect, Release, Reply, Stage, Stats, Stop, Swap

ArmHook = Callable[[], dict[str, Any]]
DigestTensors = Callable[[Mapping[str, NDArray[np.uint8]]], dict[str, str]]

# Below the serve loop. Not lower: a worker without CPU time may hold the interpreter lock meanwhile.
_WORKER_NICE = 5
# Between two pieces of staging work, so that a waiting serve loop gets the interpreter lock first.
_YIELD_S = 0.001
_log = logging.getLogger(__name__)


class _AbandonedError(EngineError):
    """Staging stopped because the process ends."""

    code = "stopping"


def _be_nice() -> None:
    # On Linux a nice value belongs to a thread, and 0 means the calling one.
    os.setpriority(os.PRIO_PROCESS, 0, _WORKER_NICE)
    torch.set_grad_enabled(False)


class Controller:
    """Owns the swap machine and the resident generations.

    Args:
        loop: the serve loop.
        device: where generations run.
        arm: starts write tracking of this process.
        digest_tensors: digests named byte arrays.
    """

    def __init__(self, loop: ServeLoop, *, device: torch.device, arm: ArmHook, digest_tensors: DigestTensors) -> None:
        self._loop = loop
        self._device = device
        self._arm = arm
        self._digest_tensors = digest_tensors
        self._lock = threading.Lock()
        self._machine = SwapMachine.empty()
        self._digests: dict[int, str] = {}
        self._generations: dict[int, Generation] = {}
        self._stopping = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="control-worker", initializer=_be_nice)

    def handle(self, message: Control) -> Future[Reply]:
        """Begin to carry out ``message``; never raises."""
        try:
            with self._lock:
                return self._dispatch(message)
        except Exception as error:
            # A trust boundary: whatever goes wrong is the answer, and serving goes on.
            return _settled(_refusal(error))

    def close(self) -> None:
        """Abandon staging, wait for the worker, free all generations; the loop has ended."""
        self._stopping = True
        self._worker.shutdown(cancel_futures=True)
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
                self._machine.release(message.generation)
                future = self._work(lambda: self._release(message.generation))
            case Inspect():
                generation = self._resident(message.generation)
                future = self._work(lambda: self._inspect(generation))
            case Arm():
                future = self._work(lambda: Reply(data=self._arm()))
            case Stats():
                future = _settled(Reply(data=self._stats()))
            case Stop():
                future = _settled(Reply())
        return future

    def _begin(self, message: Stage) -> Callable[[], Reply]:
        self._machine.begin(message.generation)
        known = {number: self._digests.get(number, "") for number in self._machine.states}
        self._digests = known | {message.generation: message.digest}
        return lambda: self._stage(message)

    def _work(self, job: Callable[[], Reply]) -> Future[Reply]:
        def guarded() -> Reply:
            try:
                return job()
            except Exception as error:
                return _refusal(error)

        return self._worker.submit(guarded)

    def _resident(self, number: int) -> Generation:
        generation = self._generations.get(number)
        if generation is None:
            raise SwapRefusedError("not_ready", f"generation {number} is not resident")
        return generation

    def _apply(self, number: int, event: Event) -> None:
        with self._lock:
            self._machine.apply(number, event)

    def _checkpoint(self) -> None:
        if self._stopping:
            raise _AbandonedError("the engine is stopping")
        time.sleep(_YIELD_S)

    def _stage(self, message: Stage) -> Reply:
        number = message.generation
        with self._lock:
            active = None if self._machine.active is None else self._generations[self._machine.active]
        try:
            with collector.paused():
                generation, report = stage(
                    number,
                    Path(message.folder),
                    message.digest,
                    device=self._device,
                    active=active,
                    report=lambda event: self._apply(number, event),
                    checkpoint=self._checkpoint,
                )
        except Exception:
            self._apply(number, Event.FAILED)
            raise
        with self._lock:
            self._generations[number] = generation
        if active is None:
            self._loop.activate(generation).result()
            with self._lock:
                self._machine.activate_first(number)
        return Reply(
            data={
                "weights_digest": generation.build.weights_digest,
                "kv_signature": generation.build.kv_signature,
                "mode": "carry" if report.carries else "recompute",
                "load_ms": report.load_ms,
                "capture_ms": report.capture_ms,
                "warm_ms": report.warm_ms,
                "golden": list(generation.golden),
            }
        )

    def _swap(self, message: Swap) -> Future[Reply]:
        self._machine.request(message.generation)
        try:
            assert self._machine.active is not None
            active, target = self._generations[self._machine.active], self._generations[message.generation]
            mode = resolve(
                message.policy,
                shared_arena=target.arena is active.arena,
                same_vocabulary=target.build.config.vocab_size == active.build.config.vocab_size,
            )
        except Exception:
            self._machine.miss()
            raise
        now_s = time.monotonic()
        pending = PendingSwap(
            target,
            mode,
            requested_s=now_s,
            deadline_s=now_s + message.deadline_s,
            exchanged=self._exchanged,
            missed=self._missed,
        )
        self._loop.request_swap(pending)
        return pending.reply

    def _exchanged(self) -> None:
        with self._lock:
            self._machine.exchange()

    def _missed(self) -> None:
        with self._lock:
            self._machine.miss()

    def _release(self, number: int) -> Reply:
        with self._lock:
            generation = self._generations.pop(number)
        self._loop.detach(generation).result()
        generation.close()
        self._apply(number, Event.FREED)
        return Reply()

    def _inspect(self, generation: Generation) -> Reply:
        tensors: dict[str, Any] = {}
        arrays: dict[str, NDArray[np.uint8]] = {}
        for name, tensor in generation.build.model.weights.items():
            tensors[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            arrays[name] = tensor.view(-1).view(torch.uint8).cpu().numpy()
        for name, digest in self._digest_tensors(arrays).items():
            tensors[name]["digest"] = digest
        if generation.build.config.tied:
            tensors["lm_head.weight"] = {"alias_of": "model.embed_tokens.weight"}
        return Reply(data={"tensors": tensors})

    def _stats(self) -> dict[str, Any]:
        machine, resident = self._machine, self._generations
        arenas = {generation.arena.serial: generation.arena.size_bytes for generation in resident.values()}
        return {
            **self._loop.metrics.as_dict(),
            "running": self._loop.running,
            "waiting": self._loop.waiting,
            "active_generation": machine.active or 0,
            "active_digest": self._digests[machine.active] if machine.active is not None else "",
            "host_state": machine.host.value,
            "kv_bytes": sum(arenas.values()),
            "weight_bytes": sum(generation.build.weight_bytes for generation in resident.values()),
            "backend": next((generation.backend.name for generation in resident.values()), ""),
            "generations": [
                {
                    "generation": number,
                    "digest": self._digests[number],
                    "state": state.value,
                    "weights_digest": resident[number].build.weights_digest if number in resident else "",
                }
                for number, state in machine.states.items()
            ],
        }


def _settled(reply: Reply) -> Future[Reply]:
    done: Future[Reply] = Future()
    done.set_result(reply)
    return done


def _refusal(error: Exception) -> Reply:
    if isinstance(error, EngineError):
        return Reply(error.code, str(error))
    _log.error("control message failed", exc_info=error)
    return Reply("internal", f"{type(error).__name__}: {error}")
