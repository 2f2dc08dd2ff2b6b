"""Operations on the agent: uploads and event streams, HTTP over its unix socket."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from patchctl.inputs import unreadable
from patchctl.question import refusal, unreachable

# The agent writes a heartbeat line every 5 s, so a longer silence means it is gone, not busy.
_READ_S_MAX = 30.0
_CONNECT_S_MAX = 3.0


class AgentClient:
    """Talks to one agent. Closing it never cancels a transaction: the host owns that.

    Every method raises PatchctlError: ``host.unreachable`` (exit 13) when no agent answers, or the
    agent's own refusal, unchanged.
    """

    def __init__(self, agent: Path) -> None:
        self._agent = agent
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(agent)),
            base_url="http://agent",
            timeout=httpx.Timeout(_READ_S_MAX, connect=_CONNECT_S_MAX),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def deploy(self, patch: Path, attestations: Path, swap: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Upload a patch with its attestations and follow the transaction's events to the end.

        ``swap`` holds what differs from the defaults of the agent's ``SwapOptions``.
        """
        op_id = uuid.uuid4().hex
        for part, path in (("patch", patch), ("attestations", attestations)):
            self._upload(f"/v1/uploads/{op_id}/{part}", path)
        yield from self._events("/v1/deploy", {"op_id": op_id, "swap": swap})

    def rollback(self, to: int | None) -> Iterator[dict[str, Any]]:
        """Return to a recorded generation and follow the events to the end."""
        yield from self._events("/v1/rollback", {"op_id": uuid.uuid4().hex, "to": to})

    def reclaim(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Set the engine's memory reclaim hook; what the engine says about it."""
        try:
            response = self._http.post("/v1/engine/reclaim", json=request)
        except httpx.HTTPError as error:
            raise unreachable(self._agent, error) from error
        if response.is_error:
            raise refusal(response.status_code, response.content)
        answer: dict[str, Any] = response.json()
        return answer

    def _upload(self, url: str, path: Path) -> None:
        try:
            with path.open("rb") as stream:
                response = self._http.put(url, content=stream)
        except OSError as error:
            raise unreadable(path, error) from error
        except httpx.HTTPError as error:
            raise unreachable(self._agent, error) from error
        if response.is_error:
            raise refusal(response.status_code, response.content)

    def _events(self, url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", url, json=body) as response:
                if response.is_error:
                    raise refusal(response.status_code, response.read())
                for line in response.iter_lines():
                    event: dict[str, Any] = json.loads(line)
                    if event["event"] != "heartbeat":
                        yield event
        except httpx.HTTPError as error:
            raise unreachable(self._agent, error) from error
