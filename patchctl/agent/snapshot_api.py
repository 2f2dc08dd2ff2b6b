"""The snapshot routes of the agent's HTTP API. They only translate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec import Struct
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from patchctl.agent.snapshots import HostSnapshots

_T = TypeVar("_T")
ReadBody = Callable[[Request, type[_T]], Awaitable[_T]]


class TakeRequest(Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/snapshots``."""

    label: str = "manual"


class DiffRequest(Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/snapshots/diff``; ``after`` None means memory as it is now."""

    before: str
    after: str | None = None


class RestoreRequest(Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/snapshots/restore``; ``generation`` None means the active one."""

    snapshot: str
    tensors: list[str]
    generation: int | None = None


def snapshot_routes(snapshots: HostSnapshots, read_body: ReadBody[Any]) -> list[Route]:
    """The routes; ``read_body`` reads a bounded JSON body of a type."""

    async def take(request: Request) -> Response:
        body: TakeRequest = await read_body(request, TakeRequest)
        return await _answer(snapshots.take, body.label)

    async def entries(_request: Request) -> Response:
        return await _answer(snapshots.entries)

    async def show(request: Request) -> Response:
        return await _answer(snapshots.show, request.path_params["identifier"])

    async def remove(request: Request) -> Response:
        return await _answer(snapshots.remove, request.path_params["identifier"])

    async def diff(request: Request) -> Response:
        body: DiffRequest = await read_body(request, DiffRequest)
        return await _answer(snapshots.diff, body.before, body.after)

    async def verify(_request: Request) -> Response:
        return await _answer(snapshots.verify)

    async def restore(request: Request) -> Response:
        body: RestoreRequest = await read_body(request, RestoreRequest)
        return await _answer(snapshots.restore, body.snapshot, body.tensors, body.generation)

    return [
        Route("/v1/snapshots", entries),
        Route("/v1/snapshots", take, methods=["POST"]),
        Route("/v1/snapshots/diff", diff, methods=["POST"]),
        Route("/v1/snapshots/verify", verify, methods=["POST"]),
        Route("/v1/snapshots/restore", restore, methods=["POST"]),
        Route("/v1/snapshots/{identifier}", show),
        Route("/v1/snapshots/{identifier}", remove, methods=["DELETE"]),
    ]


async def _answer(work: Callable[..., dict[str, Any]], *arguments: Any) -> Response:
    return JSONResponse({"schema": 1, **await run_in_threadpool(work, *arguments)})
