"""The agent's HTTP API on a unix socket. It only translates; the agent decides."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from patchctl.agent.requests import DeployRequest, ReclaimRequest, RollbackRequest
from patchctl.agent.snapshot_api import snapshot_routes
from patchctl.errors import ExitCode, PatchctlError

if TYPE_CHECKING:
    from patchctl.agent.agent import Agent

# Largest upload: a full 70B bf16 build is 140 GB; a patch that replaces all of it is no hotfix.
PATCH_BYTES_MAX = 256 << 30
# 64 attestations of 1 MiB, the verifier's own limit.
ATTESTATIONS_BYTES_MAX = 64 << 20
_BODY_BYTES_MAX = 64 << 10
_HISTORY_MAX = 1000
# Shorter than the client's read timeout by a wide margin.
_HEARTBEAT_S = 5.0
_OP_ID = re.compile(r"[0-9a-f]{32}\Z")
_PART_BYTES_MAX = {"patch": PATCH_BYTES_MAX, "attestations": ATTESTATIONS_BYTES_MAX}
_HTTP_STATUS = {
    ExitCode.USAGE: 400,
    ExitCode.NOT_FOUND: 404,
    ExitCode.AUTH: 403,
    ExitCode.SIGNATURE: 422,
    ExitCode.POLICY_DENIED: 403,
    ExitCode.FENCED: 409,
    ExitCode.INCOMPATIBLE: 409,
}

_T = TypeVar("_T")


def create_app(agent: Agent) -> Starlette:
    """The API of ``agent``."""

    async def status(_request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(agent.status))

    async def history(request: Request) -> Response:
        try:
            limit = min(max(int(request.query_params.get("limit", "50")), 1), _HISTORY_MAX)
        except ValueError as error:
            raise _bad_request("limit is not a number") from error
        records = await run_in_threadpool(agent.journal.history, limit)
        return JSONResponse({"transactions": [msgspec.to_builtins(record) for record in records]})

    async def transaction(request: Request) -> Response:
        found = await run_in_threadpool(agent.transaction, request.path_params["identifier"])
        return JSONResponse(found)

    async def upload(request: Request) -> Response:
        part, op_id = request.path_params["part"], _op_id(request.path_params["op_id"])
        if part not in _PART_BYTES_MAX:
            raise _bad_request(f"no such part {part!r}")
        with agent.inbox.receive(op_id, part, bytes_max=_PART_BYTES_MAX[part]) as sink:
            async for chunk in request.stream():
                await run_in_threadpool(sink.write, chunk)
        return Response(status_code=204)

    async def deploy(request: Request) -> Response:
        body = await _body(request, DeployRequest)
        _op_id(body.op_id)
        operation = await run_in_threadpool(agent.deploy, body.op_id, _actor(request), body.swap)
        return _stream(operation.follow(_HEARTBEAT_S))

    async def rollback(request: Request) -> Response:
        body = await _body(request, RollbackRequest)
        _op_id(body.op_id)
        operation = await run_in_threadpool(agent.rollback, body.op_id, _actor(request), body.to)
        return _stream(operation.follow(_HEARTBEAT_S))

    async def reclaim(request: Request) -> Response:
        body = await _body(request, ReclaimRequest)
        return JSONResponse({"schema": 1, **await run_in_threadpool(agent.reclaim, body)})

    return Starlette(
        routes=[
            Route("/v1/status", status),
            Route("/v1/history", history),
            Route("/v1/transactions/{identifier}", transaction),
            Route("/v1/uploads/{op_id}/{part}", upload, methods=["PUT"]),
            Route("/v1/deploy", deploy, methods=["POST"]),
            Route("/v1/rollback", rollback, methods=["POST"]),
            Route("/v1/engine/reclaim", reclaim, methods=["POST"]),
            *snapshot_routes(agent.snapshots, _body),
        ],
        exception_handlers={PatchctlError: _on_refusal, Exception: _on_defect},
    )


async def _on_refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PatchctlError)
    return JSONResponse(error.as_dict(), status_code=_HTTP_STATUS.get(error.exit_code, 500))


async def _on_defect(_request: Request, error: Exception) -> Response:
    defect = PatchctlError(
        code="host.internal",
        what="the agent could not answer",
        why=f"{type(error).__name__}: {error}",
        serving="the active generation, untouched",
        next_command="patchctl status",
    )
    return JSONResponse(defect.as_dict(), status_code=500)


async def _body(request: Request, kind: type[_T]) -> _T:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > _BODY_BYTES_MAX:
            raise _bad_request(f"the body has more than {_BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(bytes(raw), type=kind)
    except msgspec.MsgspecError as error:
        raise _bad_request(str(error)) from error


def _op_id(text: str) -> str:
    if not _OP_ID.match(text):
        raise _bad_request("op_id must be 32 lower-case hex digits")
    return text


def _bad_request(why: str) -> PatchctlError:
    return PatchctlError(
        code="api.bad_request",
        what="the agent refused the request",
        why=why,
        exit_code=ExitCode.USAGE,
        serving="the active generation, untouched",
        next_command="patchctl --help",
    )


def _stream(events: Iterator[dict[str, Any]]) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        async for event in iterate_in_threadpool(events):
            yield msgspec.json.encode({"schema": 1, **event}) + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _actor(request: Request) -> str:
    return request.client.host if request.client else "unknown"
