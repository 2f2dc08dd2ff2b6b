"""Request bodies of the OpenAI-compatible API, checked and reduced to what the front needs.

Source: OpenAI API reference, "Create completion" and "Create chat completion". Unknown fields are
ignored, as OpenAI does; a known field of a wrong type or value is a 400 that names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from engine.wire import Sampling

# OpenAI allows 4. Together with the length they bound the work per token.
_STOPS_MAX: Final = 4
_STOP_CHARS_MAX: Final = 256
_TEMPERATURE_MAX: Final = 2.0
_SEED_BOUND: Final = 1 << 63
# OpenAI's default for /v1/completions; a chat may fill the context.
_COMPLETION_TOKENS: Final = 16
_FIELD = re.compile(r"`\$\.(\w+)")


class RequestRefusedError(Exception):
    """A request that is answered with an error and never reaches the engine.

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


@dataclass(frozen=True, slots=True)
class Options:
    """What both endpoints share. ``tokens_max`` None: as many as the context holds."""

    model: str | None
    tokens_max: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


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


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    user: str | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[str | int]


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None


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
    tokens_max = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    options = _options(body, tokens_max, "max_tokens")
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
    if body.max_completion_tokens is not None:
        return ChatCall(messages, _options(body, body.max_completion_tokens, "max_completion_tokens"))
    return ChatCall(messages, _options(body, body.max_tokens, "max_tokens"))


_BodyType = TypeVar("_BodyType", bound=_Body)


def _decode(raw: bytes, kind: type[_BodyType]) -> _BodyType:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error)) or re.search(r"required field `(\w+)`", str(error))
        raise _bad(str(error), field and field.group(1)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _bad(f"the body is not valid JSON: {error}", None) from error


def _bad(message: str, param: str | None) -> RequestRefusedError:
    return RequestRefusedError(message, param=param)


def _options(body: _Body, tokens_max: int | None, tokens_field: str) -> Options:
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    rules = (
        (tokens_max is None or tokens_max >= 1, tokens_field, "must be at least 1"),
        (0.0 <= temperature <= _TEMPERATURE_MAX, "temperature", "must be between 0 and 2"),
        (0.0 < top_p <= 1.0, "top_p", "must be above 0 and at most 1"),
        (body.seed is None or -_SEED_BOUND <= body.seed < _SEED_BOUND, "seed", "must fit 64 bits"),
        (body.n in (None, 1), "n", "must be 1: one answer per request"),
        (len(stops) <= _STOPS_MAX, "stop", f"must be at most {_STOPS_MAX} strings"),
        (all(0 < len(stop) <= _STOP_CHARS_MAX for stop in stops), "stop", f"needs 1 to {_STOP_CHARS_MAX} characters"),
    )
    for holds, field, rule in rules:
        if not holds:
            raise _bad(f"{field} {rule}", field)
    return Options(
        model=body.model,
        tokens_max=tokens_max,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=body.seed),
        stops=stops,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _content(message: _Message) -> str:
    """Text of a message; a list of parts must be text parts only."""
    if not isinstance(message.content, list):
        return message.content or ""
    if any(part.type != "text" or part.text is None for part in message.content):
        raise _bad("only text content is served", "messages")
    return "".join(part.text or "" for part in message.content)
