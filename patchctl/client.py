"""The command line's side of the agent API: HTTP over the agent's unix socket."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from patchctl.errors import ExitCode, PatchctlError

# The agent writes a heartbeat line every 5 s, so a longer silence means it is gone, not busy.
_READ_S_MAX = 30.0
_CONNECT_S_MAX = 3.0


class AgentClient:
    """Talks to one agent. Closing it never cancels a transaction: the host owns that.

    Every method raises PatchctlError: ``host.unreachable`` (exit 13) when no agent answers, or the
    agent's own refusal, unchanged.
    """

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket_path)),
            base_url="http://agent",
            timeout=httpx.Timeout(_READ_S_MAX, connect=_CONNECT_S_MAX),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def status(self) -> dict[str, Any]:
        """What serves, what is resident, what runs."""
        return self._json("GET", "/v1/status")

    def history(self, limit: int) -> list[dict[str, Any]]:
        """The newest transactions, newest first."""
        found: list[dict[str, Any]] = self._json("GET", f"/v1/history?limit={limit}")["transactions"]
        return found

    def transaction(self, identifier: str) -> dict[str, Any]:
        """One transaction with its steps and evidence."""
        return self._json("GET", f"/v1/transactions/{identifier}")

    def deploy(self, patch: Path, attestations: Path) -> Iterator[dict[str, Any]]:
        """Upload a patch with its attestations and follow the transaction's events to the end."""
        op_id = uuid.uuid4().hex
        for part, path in (("patch", patch), ("attestations", attestations)):
            with _open(path) as stream:
                self._send("PUT", f"/v1/uploads/{op_id}/{part}", content=stream)
        yield from self._events("/v1/deploy", {"op_id": op_id})

    def rollback(self, to: int | None) -> Iterator[dict[str, Any]]:
        """Return to a recorded generation and follow the events to the end."""
        yield from self._events("/v1/rollback", {"op_id": uuid.uuid4().hex, "to": to})

    def _json(self, method: str, url: str) -> dict[str, Any]:
        data: dict[str, Any] = self._send(method, url).json()
        return data

    def _send(self, method: str, url: str, **kwargs: Any) -> httpx.Response:
        try:
            response = self._http.request(method, url, **kwargs)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response)
        return response

    def _events(self, url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", url, json=body) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    event: dict[str, Any] = json.loads(line)
                    if event["event"] != "heartbeat":
                        yield event
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> PatchctlError:
        return PatchctlError(
            code="host.unreachable",
            what="no agent answered",
            why=f"{self._socket_path}: {type(error).__name__}: {error}",
            exit_code=ExitCode.UNREACHABLE,
            serving="unknown: a running engine host keeps serving without its operator",
            next_command="patchctl engine serve --build DIR, or --host SOCKET",
        )


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> PatchctlError:
    """The error for an input file that cannot be read."""
    missing = isinstance(error, FileNotFoundError)
    return PatchctlError(
        code="input.missing" if missing else "input.unreadable",
        what=f"cannot read {path}",
        why=error.strerror or str(error),
        exit_code=ExitCode.NOT_FOUND if missing else ExitCode.USAGE,
        serving="the active generation, untouched",
        next_command=f"ls -l {path}",
    )


def _refusal(response: httpx.Response) -> PatchctlError:
    try:
        body = response.json()
        return PatchctlError(**{**body, "exit_code": ExitCode(body["exit_code"])})
    except (ValueError, KeyError, TypeError):
        return PatchctlError(
            code="host.bad_answer",
            what="the agent's answer was not understood",
            why=f"HTTP {response.status_code}",
            exit_code=ExitCode.UNREACHABLE,
            next_command="patchctl --version",
        )
