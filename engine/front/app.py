"""The HTTP application: OpenAI-compatible endpoints, health and metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from engine.front.answer import Answer
from engine.front.api import ChatCall, CompletionCall, RequestRefusedError, parse_chat, parse_completion
from engine.front.generations import Generation, Generations
from engine.front.link import WAITING_MAX, EngineLink
from engine.front.metrics import Metrics
from engine.front.schema import Shape, error_body
from engine.front.template import ChatTemplateError

# A context of 8192 tokens is about 40 KiB of text; 1 MiB leaves room for long token-id lists and escapes.
BODY_BYTES_MAX: Final = 1 << 20
# A client that needs longer for its body is stuck; its connection is wanted for others.
_BODY_S_MAX: Final = 30.0
# Shorter prompts are tokenised in place: the hop to the worker thread costs more than the work (0.5 ms).
_INLINE_CHARS: Final = 2048
_RETRY_AFTER_S: Final = 1
_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[!-~]{1,128}\Z")


@dataclass(slots=True)
class Front:
    """What the handlers share. ``worker`` is one thread for slow work; ``stopping`` refuses new requests."""

    generations: Generations
    link: EngineLink
    metrics: Metrics
    worker: Executor
    stopping: bool = False

    @property
    def healthy(self) -> bool:
        """Whether a new request would be served."""
        return self.generations.active is not None and self.link.up and not self.stopping

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        return await self._serve(request, parse_completion)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        return await self._serve(request, parse_chat)

    async def models(self, _request: Request) -> Response:
        """GET /v1/models: the active build's model."""
        active = self.generations.active
        data = []
        if active is not None:
            root = {"root": active.build, "max_model_len": active.assets.context_tokens}
            data = [{"id": active.model_name, "object": "model", "created": 0, "owned_by": "patchctl", **root}]
        return JSONResponse({"object": "list", "data": data})

    async def health(self, _request: Request) -> Response:
        """GET /health: 200 only while requests are served."""
        active = self.generations.active
        body = {
            "status": "ok" if self.healthy else "unavailable",
            "generation": active and active.number,
            "engine_link": self.link.up,
        }
        return JSONResponse(body, status_code=200 if self.healthy else 503)

    async def prometheus(self, _request: Request) -> Response:
        """GET /metrics."""
        active = self.generations.active
        page = self.metrics.prometheus(
            running=self.link.running,
            waiting=self.link.waiting,
            generations=[(one.number, one.build, one is active) for one in self.generations],
        )
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def _serve(self, request: Request, parse: Callable[[bytes], CompletionCall | ChatCall]) -> ASGIApp:
        given = request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
        try:
            call = parse(await _read_body(request))
            self._check_ready()
            generation = self.generations.enter()
            assert generation is not None
        except RequestRefusedError as error:
            return self._refuse(error, request_id)
        try:
            return await self._begin(call, generation, request_id)
        except RequestRefusedError as error:
            refused = error
        except Exception:  # the build's code: whatever it raises ends this request only
            _log.exception("request %s failed before it was submitted", request_id)
            message = "the request could not be prepared"
            refused = RequestRefusedError(message, status=500, kind="server_error", code="request_path_failed")
        except asyncio.CancelledError:
            self.generations.leave(generation)
            raise
        self.generations.leave(generation)
        return self._refuse(refused, request_id)

    async def _begin(self, call: CompletionCall | ChatCall, generation: Generation, request_id: str) -> Answer:
        """Turn a call into a request at the engine. The generation has been entered; the answer leaves it.

        Raises:
            RequestRefusedError: wrong model, prompt refused or too long, or the state changed meanwhile.
        """
        options = call.options
        if options.model is not None and options.model != generation.model_name:
            message = f"the model {options.model!r} does not exist; this host serves {generation.model_name!r}"
            raise RequestRefusedError(message, status=404, param="model", code="model_not_found")
        prompt = await self._prompt(call, generation)
        tokens_max = _fit(len(prompt), options.tokens_max, generation.assets.context_tokens)
        self._check_ready()
        inflight = self.link.submit(generation, tuple(prompt), tokens_max, options.sampling)
        return Answer(
            inflight=inflight,
            generation=generation,
            shape=_shape(call, generation.model_name),
            options=options,
            prompt_tokens=len(prompt),
            request_id=request_id,
            metrics=self.metrics,
            leave=lambda: self.generations.leave(generation),
        )

    async def _prompt(self, call: CompletionCall | ChatCall, generation: Generation) -> Sequence[int]:
        """Token ids of the prompt, by the generation's own request path."""
        path = generation.path
        if isinstance(call, ChatCall):
            try:
                text = path.chat_prompt(call.messages)
            except ChatTemplateError as error:
                raise RequestRefusedError(str(error), param="messages") from error
        elif isinstance(call.prompt, str):
            text = call.prompt
        else:
            size = generation.assets.vocabulary_size
            if not all(0 <= token < size for token in call.prompt):
                raise RequestRefusedError(f"prompt token ids must be from 0 to {size - 1}", param="prompt")
            return call.prompt
        # A chat template writes the special tokens itself.
        add_special = isinstance(call, CompletionCall)
        if len(text) <= _INLINE_CHARS:
            return path.encode(text, add_special=add_special)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.worker, lambda: path.encode(text, add_special=add_special))

    def _check_ready(self) -> None:
        """Refuse while nothing serves or too many wait."""
        if not self.healthy:
            message = "no model generation is active, or the engine cannot be reached"
            raise RequestRefusedError(
                message, status=503, kind="server_error", code="unavailable", retry_after_s=_RETRY_AFTER_S
            )
        if self.link.waiting >= WAITING_MAX:
            message = f"{WAITING_MAX} requests are waiting already"
            raise RequestRefusedError(
                message, status=429, kind="rate_limit_error", code="queue_full", retry_after_s=_RETRY_AFTER_S
            )

    def _refuse(self, error: RequestRefusedError, request_id: str) -> Response:
        self.metrics.rejected += 1
        headers = {"x-request-id": request_id}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
        return Response(error_body(error), error.status, headers, media_type="application/json")


def make_app(front: Front) -> Starlette:
    """The application's routes."""
    return Starlette(
        routes=[
            Route("/v1/completions", front.completions, methods=["POST"]),
            Route("/v1/chat/completions", front.chat_completions, methods=["POST"]),
            Route("/v1/models", front.models, methods=["GET"]),
            Route("/health", front.health, methods=["GET"]),
            Route("/metrics", front.prometheus, methods=["GET"]),
        ]
    )


def _shape(call: CompletionCall | ChatCall, model_name: str) -> Shape:
    if isinstance(call, CompletionCall):
        return Shape("completion", f"cmpl-{uuid.uuid4().hex}", int(time.time()), model_name)
    return Shape("chat", f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model_name)


async def _read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        RequestRefusedError: larger than allowed, too slow, or the client left.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S_MAX):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    message = f"the body has more than {BODY_BYTES_MAX} bytes"
                    raise RequestRefusedError(message, status=413, code="body_too_large")
    except TimeoutError:
        raise RequestRefusedError("the body did not arrive in time", status=408) from None
    except ClientDisconnect:
        raise RequestRefusedError("the client left") from None
    return bytes(body)


def _fit(prompt_tokens: int, tokens_max: int | None, context_tokens: int) -> int:
    """Tokens to generate, so that prompt and answer fit the context.

    Raises:
        RequestRefusedError: they do not, or the prompt is empty.
    """
    if prompt_tokens == 0:
        raise RequestRefusedError("the prompt is empty", param="prompt")
    asked = 1 if tokens_max is None else tokens_max
    if prompt_tokens + asked > context_tokens:
        message = (
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{prompt_tokens + asked} tokens ({prompt_tokens} in the prompt, {asked} for the answer)."
        )
        raise RequestRefusedError(message, code="context_length_exceeded")
    return context_tokens - prompt_tokens if tokens_max is None else tokens_max
