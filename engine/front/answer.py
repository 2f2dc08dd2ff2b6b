"""Delivering one response: a stream of server-sent events, or one JSON body.

Both watch for the client leaving while they wait for the engine, and both end in exactly one way that is
counted: completed, failed or cancelled. A stream that cannot go on says so in an error event and lacks
``[DONE]``; it is never just cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from engine.front.api import Options, RequestRefusedError
from engine.front.detokenize import make_detokenizer
from engine.front.generations import Generation
from engine.front.inflight import ClientGoneError, Inflight, Piece, ResponseFailedError
from engine.front.metrics import Metrics, Outcome
from engine.front.path import StreamWriter
from engine.front.schema import Origin, Shape, Usage, error_body
from engine.front.stops import StopMatcher

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
    request_id: str
    metrics: Metrics
    leave: Callable[[], None]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Deliver it (ASGI)."""
        watch = asyncio.ensure_future(_disconnected(receive))
        watch.add_done_callback(lambda _: self.inflight.push(ClientGoneError()))
        outcome: Outcome = "failed"
        try:
            outcome = await (self._stream(send) if self.options.stream else self._whole(send))
        except ClientGoneError:
            outcome = "cancelled"
        finally:
            watch.cancel()
            self.inflight.cancel()
            self.metrics.count(outcome)
            self.leave()

    async def _whole(self, send: Send) -> Outcome:
        text = []
        try:
            async for piece in self._pieces():
                text.append(piece.text)
        except ResponseFailedError as error:
            return await self._fail(send, error)
        assert piece.finish is not None
        body = self.shape.body("".join(text), piece.finish, self._usage, self._origin)
        await _start(send, 200, [*self._headers(b"application/json"), _length(body)])
        await _send_body(send, body, more=False)
        return piece.finish

    async def _stream(self, send: Send) -> Outcome:
        started = False
        writer = None
        try:
            writer = self.generation.path.open_stream(self.shape.response_id)
            async for piece in self._pieces():
                # The status waits for the first text: until then a failure can still be a 5xx.
                if not started:
                    await _start(send, 200, self._headers(b"text/event-stream; charset=utf-8"))
                    started = True
                    opening = self.shape.opening()
                    if opening is not None:
                        await _send_body(send, bytes(writer.event(opening)))
                origin = None if piece.finish is None else self._origin
                await _send_body(send, bytes(writer.event(self.shape.chunk(piece.text, piece.finish, origin))))
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
        assert piece.finish is not None
        return piece.finish

    def _pieces(self) -> AsyncIterator[Piece]:
        detokenizer = make_detokenizer(self.generation.assets.tokenizer)
        return self.inflight.pieces(detokenizer, StopMatcher(self.options.stops))

    async def _fail(self, send: Send, error: Exception, *, started: bool = False) -> Outcome:
        """Tell the client, without the build's writer: that may be what failed."""
        if isinstance(error, ResponseFailedError):
            refused = RequestRefusedError(str(error), status=503, kind="server_error", code=error.code)
        else:
            _log.error("response %s failed", self.shape.response_id, exc_info=error)
            refused = RequestRefusedError(
                "the response failed", status=500, kind="server_error", code="request_path_failed"
            )
        body = error_body(refused, self._origin)
        if started:
            await _send_body(send, b"data: " + body + b"\n\n", more=False)
            return "failed"
        await _start(send, refused.status, [*self._headers(b"application/json"), _length(body)])
        await _send_body(send, body, more=False)
        return "failed"

    @property
    def _usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.inflight.tokens_out)

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
            (b"x-request-id", self.request_id.encode()),
            (b"x-patchctl-generation", str(self.generation.number).encode()),
        ]


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
