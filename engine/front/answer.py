"""Delivering one response: a stream of server-sent events, or one JSON body.

Both watch for the client leaving while they wait for the engine, and both end in exactly one way that is
counted. A stream that cannot go on says so in an error event and lacks ``[DONE]``; it is never just cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import Receive, Scope, Send

from engine.front.choice import Choice, Piece, ResponseFailedError
from engine.front.detokenize import make_detokenizer
from engine.front.generations import Generation
from engine.front.inflight import ClientGoneError, ClientTooSlowError, Inflight
from engine.front.logprobs import TokenLogprobs
from engine.front.metrics import Finish, Metrics, Outcome
from engine.front.options import Options
from engine.front.path import StreamWriter
from engine.front.refusal import RequestRefusedError
from engine.front.schema import Origin, Shape, Usage
from engine.front.stops import StopMatcher

# After a lost engine the last committed build is back in some seconds.
ENGINE_RETRY_S: Final = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """An ASGI response for one request at the engine.

    Attributes:
        leave: called once when the response ended, however it ended.
    """

    inflight: Inflight
    generation: Generation
    shape: Shape
    options: Options
    prompt_tokens: int
    metrics: Metrics
    leave: Callable[[], None]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Deliver it (ASGI)."""
        watch = asyncio.ensure_future(_disconnected(receive))
        watch.add_done_callback(lambda _: self.inflight.push(ClientGoneError()))
        outcome: Outcome = "request_path_failed"
        try:
            outcome = await (self._stream(send) if self.options.stream else self._whole(send))
        except ClientGoneError:
            outcome = "client_left"
        finally:
            watch.cancel()
            self.inflight.cancel()
            self._count(outcome)
            self.leave()

    async def _whole(self, send: Send) -> Outcome:
        text: list[list[str]] = [[] for _ in range(self.options.choices)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(self.options.choices)]
        finishes: list[Finish] = ["stop"] * self.options.choices
        try:
            async for piece in self._pieces():
                text[piece.index].append(piece.text)
                logprobs[piece.index] += piece.logprobs
                finishes[piece.index] = piece.finish or "stop"
        except (ResponseFailedError, ClientTooSlowError) as error:
            return await self._fail(send, error, started=False)
        choices = [
            Piece(index, "".join(text[index]), finish, tuple(logprobs[index])) for index, finish in enumerate(finishes)
        ]
        body = self.shape.body(choices, self._usage, self._origin)
        await _start(send, 200, [*self._headers(b"application/json"), _length(body)])
        await _send_body(send, body, more=False)
        return _outcome(finishes)

    async def _stream(self, send: Send) -> Outcome:
        started = False
        writer = None
        finishes: list[Finish] = []
        try:
            writer = self.generation.path.open_stream(self.shape.response_id)
            async for piece in self._pieces():
                # The status waits for the first text: until then a failure can still be a 5xx.
                if not started:
                    await _start(send, 200, self._headers(b"text/event-stream; charset=utf-8"))
                    started = True
                    await self._open_choices(send, writer)
                origin = None
                if piece.finish is not None:
                    finishes.append(piece.finish)
                    origin = self._origin
                await _send_body(send, bytes(writer.event(self.shape.chunk(piece, origin))))
            if self.options.include_usage:
                await _send_body(send, bytes(writer.event(self.shape.usage_chunk(self._usage, self._origin))))
            await _send_body(send, bytes(writer.event(b"[DONE]")), more=False)
        except ClientGoneError:
            raise
        except Exception as error:  # the writer is the build's code: whatever it raises ends this response only
            return await self._fail(send, error, started=started)
        finally:
            if writer is not None:
                _close(writer)
        return _outcome(finishes)

    async def _open_choices(self, send: Send, writer: StreamWriter) -> None:
        for index in range(self.options.choices):
            opening = self.shape.opening(index)
            if opening is not None:
                await _send_body(send, bytes(writer.event(opening)))

    def _pieces(self) -> AsyncIterator[Piece]:
        tokenizer, stops = self.generation.assets.tokenizer, self.options.stops
        choices = range(self.options.choices)
        return self.inflight.pieces([Choice(i, make_detokenizer(tokenizer), StopMatcher(stops)) for i in choices])

    async def _fail(self, send: Send, error: Exception, *, started: bool) -> Outcome:
        """Tell the client, without the build's writer: that may be what failed."""
        outcome, refused = _explain(error)
        if outcome == "request_path_failed":
            _log.error("response %s failed", self.shape.response_id, exc_info=error)
        body = refused.body(patchctl=self._origin)
        if started:
            await _send_body(send, b"data: " + body + b"\n\n", more=False)
            return outcome
        extra = [(name.encode(), value.encode()) for name, value in refused.headers.items()]
        await _start(send, refused.status, [*self._headers(b"application/json"), _length(body), *extra])
        await _send_body(send, body, more=False)
        return outcome

    def _count(self, outcome: Outcome) -> None:
        self.metrics.count(outcome)
        if outcome in ("stop", "length"):
            self.metrics.latency.observe(asyncio.get_running_loop().time() - self.inflight.arrived_s)
            self.metrics.request_prompt_tokens.observe(self.prompt_tokens)
            self.metrics.request_generation_tokens.observe(self.inflight.tokens_out)

    @property
    def _usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.inflight.cached_tokens, self.inflight.tokens_out)

    @property
    def _origin(self) -> Origin:
        return {
            "generation_begin": self.generation.number,
            "generation_end": self.inflight.generation_end,
            "build": self.generation.build,
        }

    def _headers(self, content_type: bytes) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", content_type),
            (b"cache-control", b"no-cache"),
            (b"x-patchctl-generation", str(self.generation.number).encode()),
        ]


def _outcome(finishes: list[Finish]) -> Finish:
    """Of all choices together: cut short if one of them was."""
    return "length" if "length" in finishes else "stop"


def _explain(error: Exception) -> tuple[Outcome, RequestRefusedError]:
    """How a response that cannot go on is counted, and what its client is told."""
    if isinstance(error, ResponseFailedError):
        return error.code, RequestRefusedError(
            str(error), status=503, kind="server_error", code=error.code, retry_after_s=ENGINE_RETRY_S
        )
    if isinstance(error, ClientTooSlowError):
        text = "the response was not read as fast as it was generated"
        return "client_too_slow", RequestRefusedError(text, status=503, code="client_too_slow")
    return "request_path_failed", RequestRefusedError(
        "the response failed", status=500, kind="server_error", code="request_path_failed"
    )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _close(writer: StreamWriter) -> None:
    try:
        writer.close()
    except Exception:  # the build's code; the response is already out
        _log.exception("a stream writer failed to close")


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_body(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
