"""Questions to the agent: one request over its unix socket, with the standard library alone.

``status`` is what someone types at 3 a.m.; importing an HTTP client with its own command line would
cost half of its start-up. Uploads and event streams are :mod:`patchctl.client`'s.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from patchctl.errors import ExitCode, PatchctlError

# The agent answers from memory and its journal; staging may hold a counter back for a moment.
_ANSWER_S_MAX = 30.0


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, answer_s_max: float) -> None:
        super().__init__("agent", timeout=answer_s_max)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(agent: Path, url: str) -> dict[str, Any]:
    """GET ``url`` from the agent that listens on the socket ``agent``.

    Raises:
        PatchctlError: ``host.unreachable`` (exit 13), or the agent's own refusal, unchanged.
    """
    return order(agent, "GET", url, None, answer_s_max=_ANSWER_S_MAX)


def order(agent: Path, method: str, url: str, body: dict[str, Any] | None, *, answer_s_max: float) -> dict[str, Any]:
    """One request with a JSON body, or none, and its JSON answer.

    Raises:
        PatchctlError: as :func:`ask`.
    """
    connection = _UnixConnection(agent, answer_s_max)
    try:
        connection.request(method, url, None if body is None else json.dumps(body))
        response = connection.getresponse()
        answered = response.read()
    except (OSError, HTTPException) as error:
        raise unreachable(agent, error) from error
    finally:
        connection.close()
    if response.status >= 400:  # noqa: PLR2004 - RFC 9110: 4xx and 5xx are errors
        raise refusal(response.status, answered)
    answer: dict[str, Any] = json.loads(answered)
    return answer


def unreachable(agent: Path, error: Exception) -> PatchctlError:
    """The error for an agent that does not answer."""
    return PatchctlError(
        code="host.unreachable",
        what="no agent answered",
        why=f"{agent}: {error}" if str(error) else f"{agent}: {type(error).__name__}",
        exit_code=ExitCode.UNREACHABLE,
        serving="unknown: a running engine host keeps serving without its operator",
        next_command="patchctl engine serve --build DIR, or --host SOCKET",
    )


def refusal(status: int, body: bytes) -> PatchctlError:
    """The agent's refusal as the error it was."""
    try:
        fields = json.loads(body)
        return PatchctlError(**{**fields, "exit_code": ExitCode(fields["exit_code"])})
    except (ValueError, KeyError, TypeError):
        return PatchctlError(
            code="host.bad_answer",
            what="the agent's answer was not understood",
            why=f"HTTP {status}",
            exit_code=ExitCode.UNREACHABLE,
            next_command="patchctl --version",
        )
