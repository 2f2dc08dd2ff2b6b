"""The engine as the front sees it: requests to it, tokens and exchanges from it, and its loss.

The data socket is ordered and read on the event loop, so an exchange takes effect between the last token of
the old generation and the first of the new one. The link outlives engines: when one is lost, everything in
flight ends with an error, and nothing is submitted until the next one has said what it serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from engine.front.admission import AdmissionQueue
from engine.front.choice import ResponseFailedError, TokenEvent
from engine.front.connection import EngineConnection
from engine.front.generations import Generation, Generations
from engine.front.inflight import Inflight
from engine.front.metrics import Failure, Metrics
from engine.wire import Admitted, Cancel, Exchanged, Load, Sampling, Submit, ToFront, Token, Tokens

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Sequence:
    """One choice of a response at the engine. ``last_token_s`` is None before its first token."""

    inflight: Inflight
    index: int
    prompt_tokens: int
    submitted_s: float
    waiting: bool = True
    last_token_s: float | None = None


class EngineLink:
    """Requests in flight, at whatever engine is attached."""

    def __init__(self, generations: Generations, metrics: Metrics, queue: AdmissionQueue) -> None:
        self.queue = queue
        self._generations = generations
        self._metrics = metrics
        self._connection: EngineConnection | None = None
        self._sequences: dict[int, _Sequence] = {}
        self._last_number = 0

    @property
    def up(self) -> bool:
        """Whether an engine is attached."""
        return self._connection is not None

    @property
    def waiting(self) -> int:
        """Choices the engine has not begun."""
        return self.queue.sequences

    @property
    def running(self) -> int:
        """Choices it has."""
        return len(self._sequences) - self.queue.sequences

    def connect(self) -> EngineConnection:
        """The protocol for a new data socket."""
        return EngineConnection(self)

    def submit(
        self,
        generation: Generation,
        prompt: tuple[int, ...],
        tokens_max: int,
        samplings: Sequence[Sampling],
        arrived_s: float,
    ) -> Inflight:
        """Send a response's sequences, one per sampling. The link must be up."""
        assert self._connection is not None
        now_s = asyncio.get_running_loop().time()
        numbers = tuple(range(self._last_number + 1, self._last_number + 1 + len(samplings)))
        self._last_number = numbers[-1]
        inflight = Inflight(numbers, generation.number, arrived_s, self.cancel)
        for index, (number, sampling) in enumerate(zip(numbers, samplings, strict=True)):
            self._sequences[number] = _Sequence(inflight, index, len(prompt), now_s)
            self.queue.enter(len(prompt))
            self._connection.send(Submit(number, prompt, tokens_max, sampling, generation.assets.stop_tokens))
        self._metrics.prompt_tokens += len(prompt)
        return inflight

    def cancel(self, number: int) -> None:
        """Withdraw a sequence that has not ended: its later tokens are ignored."""
        if self._forget(number) and self._connection is not None:
            self._connection.send(Cancel(number))

    def fail_all(self, code: Failure, what: str) -> None:
        """End every response with an error that its client sees."""
        for number, sequence in tuple(self._sequences.items()):
            sequence.inflight.push(ResponseFailedError(code, what))
            self.cancel(number)

    def close(self) -> None:
        """Let go of the engine."""
        if self._connection is not None:
            self._connection.abort()

    # Called by connections.

    def attached(self, connection: EngineConnection) -> None:
        """See :class:`engine.front.connection.EngineOwner`."""
        if self._connection is not None:
            replaced = self._connection
            self.lost(replaced)
            replaced.abort()
        self._connection = connection
        self._metrics.engine_starts += 1

    def lost(self, connection: EngineConnection) -> None:
        """The engine is gone: nothing in flight can be completed."""
        if connection is not self._connection:
            return
        self._connection = None
        self._generations.engine_lost()
        self._metrics.engine.engine_lost()
        self.fail_all("engine_link_lost", "the connection to the engine was lost")

    def received(self, message: ToFront) -> None:
        """Act on a message of the engine that is attached: one that was replaced is not read any more."""
        match message:
            case Tokens():
                self._take(message)
            case Admitted(request=number, cached_tokens=cached):
                self._admit(number, cached)
            case Load():
                self._metrics.engine.latest = message
            case Exchanged(generation=number):
                self._exchange(number)

    # internal

    def _exchange(self, number: int) -> None:
        before = self._generations.engine_generation
        held = self._generations.exchange(number)
        # The first message after an attach tells what is served: no swap, and its other half may yet be staged.
        if before not in (None, number):
            self._metrics.swaps += 1
            if not held:
                _log.error("the engine exchanged to generation %d, not staged here", number)

    def _admit(self, number: int, cached_tokens: int) -> None:
        sequence = self._sequences.get(number)
        if sequence is None or not sequence.waiting:
            # A sequence that was preempted is admitted again: that is not what came from the cache.
            return
        self._begin(sequence, asyncio.get_running_loop().time())
        if sequence.index == 0:
            # The prompt is counted once; later choices find what the first one computed.
            sequence.inflight.cached_tokens = cached_tokens

    def _take(self, message: Tokens) -> None:
        now_s = asyncio.get_running_loop().time()
        for token in message.tokens:
            sequence = self._sequences.get(token.request)
            if sequence is None:
                continue
            if token.token >= 0:
                self._time(sequence, now_s)
            self._push(message.generation, sequence, token)

    def _push(self, generation: int, sequence: _Sequence, token: Token) -> None:
        if token.finish is not None:
            self._forget(token.request)
        sequence.inflight.push(TokenEvent(generation, sequence.index, token.token, token.finish, token.logprobs))

    def _time(self, sequence: _Sequence, now_s: float) -> None:
        self._metrics.tokens_out += 1
        if sequence.last_token_s is None:
            self._begin(sequence, now_s)
            self._metrics.ttft.observe(now_s - sequence.inflight.arrived_s)
        else:
            self._metrics.inter_token.observe(now_s - sequence.last_token_s)
        sequence.last_token_s = now_s

    def _begin(self, sequence: _Sequence, now_s: float) -> None:
        if sequence.waiting:
            sequence.waiting = False
            self.queue.leave(sequence.prompt_tokens)
            self._metrics.queue_time.observe(now_s - sequence.submitted_s)

    def _forget(self, number: int) -> bool:
        """False: it ended before."""
        sequence = self._sequences.pop(number, None)
        if sequence is None:
            return False
        if sequence.waiting:
            self.queue.leave(sequence.prompt_tokens)
        self.queue.ended(asyncio.get_running_loop().time())
        return True
