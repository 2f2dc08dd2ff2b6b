"""Requests that are answered with an error and never reach the engine, and OpenAI's shape of an error."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


class RequestRefusedError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        kind: OpenAI's ``error.type``.
        param: the field at fault, or None.
        code: stable identifier, or None.
        retry_after_s: seconds after which a retry makes sense, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """What the error adds to the response's headers."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def body(self, **extra: Any) -> bytes:
        """OpenAI's error object; as a body, or as the last event of a stream that could not go on."""
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields, **extra})

    def response(self) -> Response:
        """The whole HTTP response."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")
