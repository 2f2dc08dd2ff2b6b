"""Response bodies of the OpenAI-compatible API.

A body, and the last chunk of a stream, carry one field of our own: ``patchctl``, with the generation
the response began and ended on and the build whose code it used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from engine.front.api import RequestRefusedError

Origin: TypeAlias = dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one response."""

    prompt_tokens: int
    completion_tokens: int

    def as_dict(self) -> dict[str, int]:
        """OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields that every body and chunk of one response share. ``created_s`` is a unix time."""

    kind: Literal["completion", "chat"]
    response_id: str
    created_s: int
    model: str

    def opening(self) -> bytes | None:
        """The chunk before the first text, where the API has one."""
        if self.kind == "completion":
            return None
        return self._encode("chat.completion.chunk", [self._delta({"role": "assistant", "content": ""}, None)])

    def chunk(self, text: str, finish: str | None = None, origin: Origin | None = None) -> bytes:
        """One chunk of text; the last one names the finish reason and the origin."""
        extra = {} if origin is None else {"patchctl": origin}
        if self.kind == "completion":
            return self._encode("text_completion", [self._text(text, finish)], **extra)
        return self._encode("chat.completion.chunk", [self._delta({"content": text} if text else {}, finish)], **extra)

    def usage_chunk(self, usage: Usage, origin: Origin) -> bytes:
        """The chunk after the last one, asked for with ``stream_options.include_usage``."""
        name = "text_completion" if self.kind == "completion" else "chat.completion.chunk"
        return self._encode(name, [], usage=usage.as_dict(), patchctl=origin)

    def body(self, text: str, finish: str, usage: Usage, origin: Origin) -> bytes:
        """The whole response, not streamed."""
        extra = {"usage": usage.as_dict(), "patchctl": origin}
        if self.kind == "completion":
            return self._encode("text_completion", [self._text(text, finish)], **extra)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._encode("chat.completion", [choice], **extra)

    def _encode(self, name: str, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        head = {"id": self.response_id, "object": name, "created": self.created_s, "model": self.model}
        return msgspec.json.encode({**head, "choices": choices, **extra})

    @staticmethod
    def _text(text: str, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}

    @staticmethod
    def _delta(delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def error_body(error: RequestRefusedError, origin: Origin | None = None) -> bytes:
    """OpenAI's error object; as a body, or as the last event of a stream that could not go on."""
    fields = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields} if origin is None else {"error": fields, "patchctl": origin})
