"""Request bodies: what is accepted, what is refused, and which field is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.front.api import RequestRefusedError, parse_chat, parse_completion
from engine.front.schema import error_body


def refusal(raw: bytes, *, chat: bool = False) -> RequestRefusedError:
    with pytest.raises(RequestRefusedError) as caught:
        (parse_chat if chat else parse_completion)(raw)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", 3),
        ("prompt", []),
        ("prompt", ["a", "b"]),
        ("prompt", ["a", 1]),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("max_tokens", "x"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("seed", 1 << 63),
        ("seed", "1"),
        ("stop", ""),
        ("stop", ["a"] * 5),
        ("stop", ["a", 1]),
        ("stop", "x" * 257),
        ("n", 2),
        ("n", 0),
        ("stream", "yes"),
        ("stream_options", 3),
        ("model", 3),
        ("user", []),
    ],
)
def test_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(json.dumps({"prompt": "a", field: value}).encode())
    assert (error.status, error.kind, error.param) == (400, "invalid_request_error", field)
    assert json.loads(error_body(error))["error"]["param"] == field


@pytest.mark.parametrize(
    "messages", [[], "x", None, [{"content": "a"}], [{"role": "user", "content": [{"type": "image_url"}]}], [3]]
)
def test_wrong_messages_are_refused_by_name(messages: Any) -> None:
    assert refusal(json.dumps({"messages": messages}).encode(), chat=True).param == "messages"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": NaN}'],
)
def test_malformed_json_is_refused(raw: bytes) -> None:
    assert refusal(raw).status == 400


def test_a_missing_prompt_is_named() -> None:
    assert refusal(b"{}").param == "prompt"


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    for parse in (parse_completion, parse_chat):
        try:
            parse(raw)
        except RequestRefusedError:
            continue


def test_defaults_and_nulls_are_openais() -> None:
    fields = ("max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "n", "user", "model")
    for body in ({"prompt": "a"}, {"prompt": "a", **dict.fromkeys(fields)}):
        call = parse_completion(json.dumps(body).encode())
        options = call.options
        assert (options.tokens_max, options.sampling.temperature, options.sampling.top_p) == (16, 1.0, 1.0)
        assert (options.stops, options.stream, options.include_usage, options.sampling.seed) == ((), False, False, None)


def test_unknown_fields_are_ignored() -> None:
    call = parse_completion(b'{"prompt": ["a"], "logit_bias": {"1": 2}, "best_of": "x", "stop": ["b"], "seed": -3}')
    assert (call.prompt, call.options.stops, call.options.sampling.seed) == ("a", ("b",), -3)


def test_token_ids_and_chat_parts() -> None:
    assert parse_completion(b'{"prompt": [1, 2]}').prompt == (1, 2)
    call = parse_chat(
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},'
        b'{"role": "assistant", "content": null}], "max_tokens": 3, "max_completion_tokens": 5,'
        b'"stream": true, "stream_options": {"include_usage": true}}'
    )
    assert call.messages == ({"role": "user", "content": "ab"}, {"role": "assistant", "content": ""})
    assert (call.options.tokens_max, call.options.stream, call.options.include_usage) == (5, True, True)
