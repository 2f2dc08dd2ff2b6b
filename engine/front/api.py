"""Request bodies of the OpenAI-compatible API, checked and reduced to what the front needs.

Source: OpenAI API reference, "Create completion" and "Create chat completion". A known field of a wrong type
or value is a 400 that names it; so is a known option that is not served (:mod:`engine.front.unserved`).
Fields known to neither are ignored, as OpenAI does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from engine.front.options import Body, Options, read_options
from engine.front.refusal import RequestRefusedError
from engine.front.unserved import refuse_unserved

# OpenAI's default for /v1/completions; a chat may fill the context.
_COMPLETION_TOKENS: Final = 16
# OpenAI's limits.
_COMPLETION_LOGPROBS_MAX: Final = 5
_CHAT_LOGPROBS_MAX: Final = 20
# msgspec names the place of an error, and the field that is missing there.
_PLACE = re.compile(r"`\$\.(\w+)")
_MISSING = re.compile(r"required field `(\w+)`")


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A call of /v1/completions; the prompt is text or token ids."""

    prompt: str | tuple[int, ...]
    options: Options


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A call of /v1/chat/completions; messages have ``role`` and ``content``."""

    messages: tuple[dict[str, str], ...]
    options: Options


class _CompletionBody(Body, kw_only=True):
    prompt: str | list[str | int]
    logprobs: int | None = None
    best_of: int | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None


class _ChatBody(Body, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def parse_completion(raw: bytes) -> CompletionCall:
    """Parse a body of /v1/completions.

    Raises:
        RequestRefusedError: 400, with the field at fault.
    """
    body = _decode(raw, _CompletionBody)
    prompt = body.prompt
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        elif not prompt or not all(isinstance(item, int) for item in prompt):
            raise _bad("prompt must be a string, a list of one string, or a list of token ids", "prompt")
    if body.logprobs is not None and not 0 <= body.logprobs <= _COMPLETION_LOGPROBS_MAX:
        raise _bad(f"logprobs must be from 0 to {_COMPLETION_LOGPROBS_MAX}", "logprobs")
    if body.best_of not in (None, 1 if body.n is None else body.n):
        raise _bad("best_of must equal n: every choice that is generated is returned", "best_of")
    tokens_max = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    options = read_options(body, tokens_max=tokens_max, tokens_field="max_tokens", logprobs=body.logprobs)
    if isinstance(prompt, str):
        return CompletionCall(prompt, options)
    return CompletionCall(tuple(item for item in prompt if isinstance(item, int)), options)


def parse_chat(raw: bytes) -> ChatCall:
    """Parse a body of /v1/chat/completions.

    Raises:
        RequestRefusedError: 400, with the field at fault.
    """
    body = _decode(raw, _ChatBody)
    if not body.messages:
        raise _bad("messages must not be empty", "messages")
    messages = tuple({"role": message.role, "content": _content(message)} for message in body.messages)
    logprobs = _chat_logprobs(body)
    if body.max_completion_tokens is None:
        tokens_max, field = body.max_tokens, "max_tokens"
    else:
        tokens_max, field = body.max_completion_tokens, "max_completion_tokens"
    return ChatCall(messages, read_options(body, tokens_max=tokens_max, tokens_field=field, logprobs=logprobs))


_BodyType = TypeVar("_BodyType", bound=Body)


def _decode(raw: bytes, kind: type[_BodyType]) -> _BodyType:
    try:
        value = msgspec.json.decode(raw)
        if isinstance(value, dict):
            refuse_unserved(value)
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        field = _PLACE.search(str(error)) or _MISSING.search(str(error))
        raise _bad(str(error), field and field[1]) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _bad(f"the body is not valid JSON: {error}", None) from error


def _bad(message: str, param: str | None) -> RequestRefusedError:
    return RequestRefusedError(message, param=param)


def _chat_logprobs(body: _ChatBody) -> int | None:
    """Alternatives per token; None when no log probabilities are asked for."""
    alternatives = body.top_logprobs
    if alternatives is None:
        return 0 if body.logprobs else None
    if not 0 <= alternatives <= _CHAT_LOGPROBS_MAX:
        raise _bad(f"top_logprobs must be from 0 to {_CHAT_LOGPROBS_MAX}", "top_logprobs")
    if not body.logprobs:
        raise _bad("top_logprobs needs logprobs to be true", "top_logprobs")
    return alternatives


def _content(message: _Message) -> str:
    """Text of a message; a list of parts must be text parts only."""
    if message.tool_calls or message.tool_call_id or message.function_call:
        raise _bad("tool calls are not served", "messages")
    if not isinstance(message.content, list):
        return message.content or ""
    if any(part.type != "text" or part.text is None for part in message.content):
        raise _bad("only text content is served", "messages")
    return "".join(part.text or "" for part in message.content)
