"""The application without sockets: request ids and OpenAI's error shape, whatever goes wrong."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from engine.front.admission import AdmissionQueue
from engine.front.app import Front, make_app
from engine.front.generations import Generations
from engine.front.link import EngineLink
from engine.front.metrics import Metrics


def ask(method: str, path: str, *, headers: dict[str, str] | None = None, broken: bool = False) -> httpx.Response:
    async def run() -> httpx.Response:
        metrics, generations = Metrics(), Generations(lambda: None)
        with ThreadPoolExecutor(1) as worker:
            front = Front(generations, EngineLink(generations, metrics, AdmissionQueue(0.0)), metrics, worker)
            if broken:
                del metrics.engine
            transport = httpx.ASGITransport(make_app(front), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
                return await client.request(method, path, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "status", "broken"),
    [
        ("GET", "/health", 503, False),
        ("GET", "/metrics", 200, False),
        ("GET", "/metrics", 500, True),
        ("GET", "/v1/models", 200, False),
        ("POST", "/v1/models", 405, False),
        ("GET", "/nowhere", 404, False),
        ("POST", "/v1/completions", 400, False),
    ],
)
def test_every_response_has_one_request_id(method: str, path: str, status: int, broken: bool) -> None:
    for given, kept in (("mine-1", True), ("two words", False)):
        response = ask(method, path, headers={"x-request-id": given}, broken=broken)
        assert response.status_code == status
        ids = response.headers.get_list("x-request-id")
        assert len(ids) == 1
        assert (ids == [given]) == kept
        if status >= 400 and path != "/health":
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_wrong_method_says_which_is_right() -> None:
    assert ask("GET", "/v1/completions").headers["allow"] == "POST"
