"""Response bodies of the OpenAI-compatible API.

A body, and the last chunk of each choice of a stream, carry one field of our own: ``patchctl``, with the
generation the response began and ended on and the build whose code it used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from engine.front.choice import Piece
from engine.front.logprobs import Spell, TokenLogprobs, chat_logprobs, completion_logprobs

Origin: TypeAlias = dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one response; the prompt is counted once, whatever the number of choices."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields that every body and chunk of one response share.

    Attributes:
        created_s: unix time.
        spell: token id → its bytes, where log probabilities are asked for.
        usage_chunks: the stream ends with a usage chunk; all others then say that they are not it.
    """

    kind: Literal["completion", "chat"]
    response_id: str
    created_s: int
    model: str
    spell: Spell | None = None
    usage_chunks: bool = False

    def opening(self, index: int) -> bytes | None:
        """The chunk before a choice's first text, where the API has one."""
        if self.kind == "completion":
            return None
        return self._chunk([self._delta(index, {"role": "assistant", "content": ""})])

    def chunk(self, piece: Piece, origin: Origin | None = None) -> bytes:
        """One chunk of text; a choice's last one names the finish reason and the origin."""
        if self.kind == "completion":
            choice = self._text(piece.index, piece.text, piece.finish, piece.logprobs)
        else:
            delta = {"content": piece.text} if piece.text or piece.logprobs else {}
            choice = self._delta(piece.index, delta, piece.finish, piece.logprobs)
        return self._chunk([choice], **({} if origin is None else {"patchctl": origin}))

    def usage_chunk(self, usage: Usage, origin: Origin) -> bytes:
        """The chunk after the last one, asked for with ``stream_options.include_usage``."""
        return self._chunk([], usage=usage.as_dict(), patchctl=origin)

    def body(self, choices: Sequence[Piece], usage: Usage, origin: Origin) -> bytes:
        """The whole response, not streamed: each choice in one piece."""
        if self.kind == "completion":
            name, out = (
                "text_completion",
                [self._text(one.index, one.text, one.finish, one.logprobs) for one in choices],
            )
        else:
            name, out = "chat.completion", [self._message(one) for one in choices]
        return self._encode(name, out, usage=usage.as_dict(), patchctl=origin)

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        name = "text_completion" if self.kind == "completion" else "chat.completion.chunk"
        return self._encode(name, choices, **({"usage": None} if self.usage_chunks else {}) | extra)

    def _encode(self, name: str, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        head = {"id": self.response_id, "object": name, "created": self.created_s, "model": self.model}
        return msgspec.json.encode({**head, "choices": choices, **extra})

    def _text(self, index: int, text: str, finish: str | None, logprobs: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(logprobs), "finish_reason": finish}

    def _message(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        logprobs = self._logprobs(piece.logprobs)
        return {"index": piece.index, "message": message, "logprobs": logprobs, "finish_reason": piece.finish}

    def _delta(
        self, index: int, delta: dict[str, str], finish: str | None = None, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs), "finish_reason": finish}

    def _logprobs(self, tokens: tuple[TokenLogprobs, ...]) -> dict[str, Any] | None:
        if self.spell is None or not tokens:
            return None
        return (completion_logprobs if self.kind == "completion" else chat_logprobs)(tokens, self.spell)
