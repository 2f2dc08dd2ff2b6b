"""Request bodies: what is accepted, what is refused, and which field is named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.front.api import parse_chat, parse_completion
from engine.front.fit import fit_tokens
from engine.front.options import Options
from engine.front.refusal import RequestRefusedError
from engine.wire import Submit

MESSAGES = [{"role": "user", "content": "a"}]


def refusal(raw: bytes, *, chat: bool = False) -> RequestRefusedError:
    with pytest.raises(RequestRefusedError) as caught:
        (parse_chat if chat else parse_completion)(raw)
    return caught.value


def completion(**fields: Any) -> Options:
    return parse_completion(json.dumps({"prompt": "a", **fields}).encode()).options


def chat(**fields: Any) -> Options:
    return parse_chat(json.dumps({"messages": MESSAGES, **fields}).encode()).options


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
        ("top_k", -2),
        ("top_k", 1 << 31),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", "x"),
        ("frequency_penalty", 2.1),
        ("logit_bias", []),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1 ": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"9" * 10: 1}),
        ("logit_bias", {"1": 100.5}),
        ("logit_bias", {"1": -101}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {str(token): 1 for token in range(301)}),
        ("logprobs", -1),
        ("logprobs", 6),
        ("logprobs", True),
        ("best_of", 2),
        ("best_of", "x"),
        ("seed", 1 << 63),
        ("seed", "1"),
        ("stop", ""),
        ("stop", ["a"] * 5),
        ("stop", ["a", 1]),
        ("stop", "x" * 257),
        ("n", 9),
        ("n", 0),
        ("n", "2"),
        ("stream", "yes"),
        ("stream_options", 3),
        ("stream_options", {"include_usage": True}),
        ("model", 3),
        ("user", []),
    ],
)
def test_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(json.dumps({"prompt": "a", field: value}).encode())
    assert (error.status, error.kind, error.param) == (400, "invalid_request_error", field)
    assert json.loads(error.body())["error"]["param"] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}, "messages"),
    ],
)
def test_wrong_chat_values_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(json.dumps({"messages": MESSAGES, **fields}).encode(), chat=True).param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True),
        ("suffix", "x"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("repetition_penalty", 1.1),
        ("min_tokens", 3),
        ("ignore_eos", True),
        ("stop_token_ids", [1]),
        ("guided_json", {}),
        ("structured_outputs", {}),
        ("chat_template", "x"),
        ("use_beam_search", True),
    ],
)
def test_an_option_that_is_not_served_is_refused_by_name(name: str, value: Any) -> None:
    for raw, is_chat in (({"prompt": "a"}, False), ({"messages": MESSAGES}, True)):
        error = refusal(json.dumps({**raw, name: value}).encode(), chat=is_chat)
        assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
        assert name in str(error)


def test_an_option_that_is_not_served_may_ask_for_nothing() -> None:
    harmless = {
        "echo": False,
        "suffix": "",
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "repetition_penalty": 1,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "guided_json": None,
    }
    assert completion(**harmless) == completion()
    assert chat(**harmless) == chat()


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "n",
        "stop",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "top_k",
        "seed",
        "best_of",
        "tools",
        "stream_options",
        "max_tokens",
        "temperature",
        "response_format",
    ]
)


@given(st.binary(max_size=200) | st.dictionaries(FIELDS, JSON).map(lambda body: json.dumps(body).encode()))
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    for parse in (parse_completion, parse_chat):
        try:
            parse(raw)
        except RequestRefusedError:
            continue


def test_defaults_and_nulls_are_openais() -> None:
    fields = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "n",
        "user",
        "model",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "best_of",
        "echo",
        "suffix",
    )
    for options in (completion(), completion(**dict.fromkeys(fields)), completion(top_k=-1, n=1, best_of=1)):
        sampling = options.sampling
        assert (options.tokens_max, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
        assert (options.stops, options.stream, options.include_usage, sampling.seed) == ((), False, False, None)
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (0.0, 0.0, ())
        assert (options.choices, sampling.logprobs, sampling.min_p) == (1, None, 0.0)


def test_sampling_options_reach_the_wire() -> None:
    options = completion(
        top_k=5,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"7": -100, "0": 2.5},
        logprobs=5,
        seed=4,
    )
    sampling = options.sampling
    assert (sampling.top_k, sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (5, 0.1, -2, 2)
    assert (sampling.logit_bias, sampling.logprobs) == (((7, -100.0), (0, 2.5)), 5)


@pytest.mark.parametrize(
    ("fields", "alternatives"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_chat_logprobs(fields: dict[str, Any], alternatives: int | None) -> None:
    assert chat(**fields).sampling.logprobs == alternatives


def test_choices_have_seeds_of_their_own_and_the_first_is_that_of_a_single_one() -> None:
    bound = (1 << 63) - 1
    assert [one.seed for one in completion(n=3, seed=7).samplings()] == [7, 8, 9]
    assert [one.seed for one in completion(n=2).samplings()] == [None, None]
    assert completion(n=3, seed=7).samplings()[0] == completion(seed=7).samplings()[0]
    last = completion(n=8, seed=bound).samplings()[-1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Submit(1, (1,), 1, last)), type=Submit).sampling == last


def test_unknown_fields_are_ignored() -> None:
    call = parse_completion(b'{"prompt": ["a"], "anything": {"1": 2}, "metadata": {}, "stop": ["b"], "seed": -3}')
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


def test_a_body_never_has_to_keep_more_log_probabilities_than_fit() -> None:
    fields = {"logprobs": True, "top_logprobs": 20, "n": 8, "max_tokens": 4000}
    with pytest.raises(RequestRefusedError) as caught:
        fit_tokens(10, chat(**fields), 8192)
    assert caught.value.param == "logprobs"
    assert fit_tokens(10, chat(**fields, stream=True), 8192) == 4000
    assert fit_tokens(10, chat(**{**fields, "n": 1}), 8192) == 4000
