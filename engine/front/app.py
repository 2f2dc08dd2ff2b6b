"""The HTTP application: OpenAI-compatible endpoints, health and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from engine.front.answer import ENGINE_RETRY_S, Answer
from engine.front.api import ChatCall, CompletionCall, parse_chat, parse_completion
from engine.front.detokenize import make_speller
from engine.front.exposition import Now, render_page
from engine.front.fit import check_token_ids, fit_tokens
from engine.front.generations import Generation, Generations
from engine.front.link import EngineLink
from engine.front.metrics import Metrics, Refusal
from engine.front.refusal import RequestRefusedError
from engine.front.request_id import RequestIds
from engine.front.schema import Shape
from engine.front.template import ChatTemplateError

# A context of 8192 tokens is about 40 KiB of text; 1 MiB leaves room for long token-id lists and escapes.
BODY_BYTES_MAX: Final = 1 << 20
# A client that needs longer for its body is stuck; its connection is wanted for others.
_BODY_S_MAX: Final = 30.0
# Shorter prompts are tokenised in place: the hop to the worker thread costs more than the work (0.5 ms).
_INLINE_CHARS: Final = 2048
_log = logging.getLogger(__name__)


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
        resident = tuple((one.number, one.build, one is active) for one in self.generations)
        now = Now(self.link.running, self.link.waiting, self.link.up, resident)
        return PlainTextResponse(render_page(self.metrics, now), media_type="text/plain; version=0.0.4")

    async def _serve(self, request: Request, parse: Callable[[bytes], CompletionCall | ChatCall]) -> ASGIApp:
        arrived_s = asyncio.get_running_loop().time()
        try:
            call = parse(await _read_body(request))
            self._check_ready()
            generation = self.generations.enter()
            assert generation is not None
        except RequestRefusedError as error:
            return self._refuse(error)
        try:
            return await self._begin(call, generation, arrived_s)
        except RequestRefusedError as error:
            refused = error
        except Exception:  # the build's code: whatever it raises ends this request only
            _log.exception("request %s failed before it was submitted", request.state.request_id)
            message = "the request could not be prepared"
            refused = RequestRefusedError(message, status=500, kind="server_error", code="request_path_failed")
        except asyncio.CancelledError:
            self.generations.leave(generation)
            raise
        self.generations.leave(generation)
        return self._refuse(refused)

    async def _begin(self, call: CompletionCall | ChatCall, generation: Generation, arrived_s: float) -> Answer:
        """Turn a call into a request at the engine. The generation has been entered; the answer leaves it.

        Raises:
            RequestRefusedError: wrong model, prompt refused or too long, or the state changed meanwhile.
        """
        options, assets = call.options, generation.assets
        if options.model is not None and options.model != generation.model_name:
            message = f"the model {options.model!r} does not exist; this host serves {generation.model_name!r}"
            raise RequestRefusedError(message, status=404, param="model", code="model_not_found")
        check_token_ids([token for token, _ in options.sampling.logit_bias], assets.vocabulary_size, "logit_bias")
        prompt = await self._prompt(call, generation)
        tokens_max = fit_tokens(len(prompt), options, assets.context_tokens)
        self._check_ready(options.choices, len(prompt))
        return Answer(
            inflight=self.link.submit(generation, tuple(prompt), tokens_max, options.samplings(), arrived_s),
            generation=generation,
            shape=_shape(call, generation),
            options=options,
            prompt_tokens=len(prompt),
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
            check_token_ids(call.prompt, generation.assets.vocabulary_size, "prompt")
            return call.prompt
        # A chat template writes the special tokens itself.
        add_special = isinstance(call, CompletionCall)
        if len(text) <= _INLINE_CHARS:
            return path.encode(text, add_special=add_special)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.worker, lambda: path.encode(text, add_special=add_special))

    def _check_ready(self, sequences: int = 1, prompt_tokens: int = 1) -> None:
        """Refuse while nothing serves or too much waits."""
        queue = self.link.queue
        if not self.healthy:
            message = "no model generation is active, or the engine cannot be reached"
            raise RequestRefusedError(
                message, status=503, kind="server_error", code="unavailable", retry_after_s=ENGINE_RETRY_S
            )
        if not queue.fits(sequences, prompt_tokens):
            retry_after_s = queue.retry_after_s(asyncio.get_running_loop().time())
            message = f"{queue.sequences} choices with {queue.prompt_tokens} prompt tokens are waiting already"
            raise RequestRefusedError(
                message, status=429, kind="rate_limit_error", code="queue_full", retry_after_s=retry_after_s
            )

    def _refuse(self, error: RequestRefusedError) -> Response:
        self.metrics.refusals[_REFUSALS.get(error.code, "invalid")] += 1
        return error.response()


_REFUSALS: Final[dict[str | None, Refusal]] = {
    "queue_full": "queue_full",
    "unavailable": "unavailable",
    "request_path_failed": "request_path_failed",
}


def make_app(front: Front) -> ASGIApp:
    """The application: its routes, errors in OpenAI's shape, and a request id on every response."""
    routes = [
        Route("/v1/completions", front.completions, methods=["POST"]),
        Route("/v1/chat/completions", front.chat_completions, methods=["POST"]),
        Route("/v1/models", front.models, methods=["GET"]),
        Route("/health", front.health, methods=["GET"]),
        Route("/metrics", front.prometheus, methods=["GET"]),
    ]
    return RequestIds(Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _defect}))


async def _no_route(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = RequestRefusedError(error.detail, status=error.status_code).response()
    response.headers.update(error.headers or {})
    return response


async def _defect(_request: Request, _error: Exception) -> Response:
    return RequestRefusedError("internal error", status=500, kind="server_error", code="internal").response()


def _shape(call: CompletionCall | ChatCall, generation: Generation) -> Shape:
    options = call.options
    return Shape(
        kind="completion" if isinstance(call, CompletionCall) else "chat",
        response_id=f"{'cmpl' if isinstance(call, CompletionCall) else 'chatcmpl'}-{uuid.uuid4().hex}",
        created_s=int(time.time()),
        model=generation.model_name,
        spell=None if options.sampling.logprobs is None else make_speller(generation.assets.tokenizer),
        usage_chunks=options.include_usage,
    )


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
