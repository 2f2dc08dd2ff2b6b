"""Several choices, log probabilities and usage, in the shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

from engine.front.testing import END_TOKEN, EnginePeer, FrontProcess, byte_token, events
from engine.wire import Logprobs, Submit

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with FrontProcess().serve(tmp_path_factory.mktemp("front") / "b") as front:
        yield front


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=4) as executor:
        yield executor


def begin(
    front: FrontProcess, pool: ThreadPoolExecutor, path: str, choices: int, **body: Any
) -> tuple[Any, list[Submit]]:
    call = pool.submit(front.post, path, **body)
    return call, [front.peer.next_submit() for _ in range(choices)]


def test_choices_are_sequences_of_their_own(front: FrontProcess, pool: ThreadPoolExecutor) -> None:
    call, submits = begin(front, pool, "/v1/completions", 3, prompt="hi", n=3, seed=5, temperature=0.5, max_tokens=9)
    assert [submit.sampling.seed for submit in submits] == [5, 6, 7]
    assert len({submit.request for submit in submits}) == 3
    assert {(submit.prompt, submit.tokens_max) for submit in submits} == {(submits[0].prompt, 9)}
    for submit, cached in zip(submits, (1, 2, 3), strict=True):
        front.peer.admit(submit.request, cached)
    # They end in another order than they began.
    front.peer.say(submits[2].request, b"ccc", "stop")
    front.peer.say(submits[0].request, b"a", "length")
    front.peer.say(submits[1].request, b"bb", "stop")
    body = call.result().json()
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (0, "a", "length"),
        (1, "bb", "stop"),
        (2, "ccc", "stop"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_stream_interleaves_its_choices(front: FrontProcess, pool: ThreadPoolExecutor) -> None:
    call, (first, second) = begin(
        front,
        pool,
        "/v1/chat/completions",
        2,
        messages=MESSAGES,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    front.peer.admit(first.request, 4)
    for data in (b"a", b"b"):
        front.peer.say(first.request, data)
        front.peer.say(second.request, data.upper())
    front.peer.say(second.request, b"C", "stop")
    front.peer.say(first.request, b"c", "length")
    *chunks, usage, done = events(call.result())
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(one["index"], one["delta"].get("role")) for one in choices[:2]] == [(0, "assistant"), (1, "assistant")]
    assert [(one["index"], one["delta"].get("content")) for one in choices[2:6]] == [
        (0, "a"),
        (1, "A"),
        (0, "b"),
        (1, "B"),
    ]
    texts = ["".join(one["delta"].get("content", "") for one in choices if one["index"] == index) for index in (0, 1)]
    assert texts == ["abc", "ABC"]
    assert [(one["index"], one["finish_reason"]) for one in choices if one["finish_reason"]] == [
        (1, "stop"),
        (0, "length"),
    ]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert chunks[-1]["patchctl"] == usage["patchctl"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_fails_the_response_and_ends_the_others(
    front: FrontProcess, pool: ThreadPoolExecutor, stream: bool
) -> None:
    failed = front.stats()["requests_failed"]
    call, submits = begin(front, pool, "/v1/completions", 3, prompt="x", n=3, stream=stream)
    front.peer.say(submits[0].request, b"whole", "stop")
    front.peer.say(submits[1].request, b"half", "error")
    response = call.result()
    error = events(response)[-1] if stream else response.json()
    assert (error["error"]["code"], response.status_code) == ("engine_error", 200 if stream else 503)
    assert "[DONE]" not in response.text
    assert front.peer.next_cancel().request == submits[2].request
    assert front.peer.cancels.empty()
    assert front.stats()["requests_failed"] == failed + 1


def test_a_stop_string_ends_only_its_choice(front: FrontProcess, pool: ThreadPoolExecutor) -> None:
    call, (first, second) = begin(front, pool, "/v1/completions", 2, prompt="x", n=2, stop="ST")
    front.peer.say(first.request, b"a ST b")
    assert front.peer.next_cancel().request == first.request
    front.peer.say(second.request, b"other S", "length")
    choices = call.result().json()["choices"]
    assert [(one["text"], one["finish_reason"]) for one in choices] == [("a ", "stop"), ("other S", "length")]


# "é" in two tokens, an end token that has no text, and a token of one character.
SCRIPT = [
    (byte_token(0xC3), Logprobs(-0.5, ((byte_token(0xA9), -0.375), (byte_token(ord("x")), -1.0)))),
    (byte_token(0xA9), Logprobs(-0.25, ((byte_token(0xA9), -0.25), (byte_token(0xC3), -2.0)))),
    (0, Logprobs(-3.0, ((byte_token(ord("a")), -0.125), (byte_token(ord("b")), -0.5)))),
    (byte_token(ord("z")), Logprobs(-1e9, ())),
]


def speak_script(peer: EnginePeer, submit: Submit) -> None:
    for index, (token, logprobs) in enumerate(SCRIPT):
        peer.emit(submit.request, token, "stop" if index == len(SCRIPT) - 1 else None, logprobs)


CHAT_CONTENT = [
    {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.375, "bytes": [0xA9]},
            {"token": "x", "logprob": -1.0, "bytes": [ord("x")]},
        ],
    },
    {
        "token": "\ufffd",
        "logprob": -0.25,
        "bytes": [0xA9],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.25, "bytes": [0xA9]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": [0xC3]},
        ],
    },
    {
        "token": "<|endoftext|>",
        "logprob": -3.0,
        "bytes": list(b"<|endoftext|>"),
        "top_logprobs": [
            {"token": "a", "logprob": -0.125, "bytes": [ord("a")]},
            {"token": "b", "logprob": -0.5, "bytes": [ord("b")]},
        ],
    },
    {"token": "z", "logprob": -9999.0, "bytes": [ord("z")], "top_logprobs": []},
]
COMPLETION = {
    "tokens": ["\ufffd", "\ufffd", "<|endoftext|>", "z"],
    "token_logprobs": [-0.5, -0.25, -3.0, -9999.0],
    "top_logprobs": [
        {"\ufffd": -0.375, "x": -1.0},
        {"\ufffd": -0.25},
        {"a": -0.125, "b": -0.5, "<|endoftext|>": -3.0},
        {"z": -9999.0},
    ],
    "text_offset": [0, 0, 1, 1],
}


def test_chat_log_probabilities(front: FrontProcess, pool: ThreadPoolExecutor) -> None:
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 10}
    whole, (submit,) = begin(front, pool, "/v1/chat/completions", 1, **asked)
    assert submit.sampling.logprobs == 2
    speak_script(front.peer, submit)
    choice = whole.result().json()["choices"][0]
    assert choice["logprobs"] == {"content": CHAT_CONTENT, "refusal": None}
    assert choice["message"]["content"] == "éz"
    streamed, (submit,) = begin(front, pool, "/v1/chat/completions", 1, **asked, stream=True)
    speak_script(front.peer, submit)
    choices = [chunk["choices"][0] for chunk in events(streamed.result())[:-1]]
    assert list(chain(*(one["logprobs"]["content"] for one in choices if one["logprobs"]))) == CHAT_CONTENT
    assert "".join(one["delta"].get("content", "") for one in choices) == "éz"


def test_completion_log_probabilities(front: FrontProcess, pool: ThreadPoolExecutor) -> None:
    whole, (submit,) = begin(front, pool, "/v1/completions", 1, prompt="x", logprobs=2)
    speak_script(front.peer, submit)
    assert whole.result().json()["choices"][0]["logprobs"] == COMPLETION
    streamed, (submit,) = begin(front, pool, "/v1/completions", 1, prompt="x", logprobs=2, stream=True)
    speak_script(front.peer, submit)
    objects = [chunk["choices"][0]["logprobs"] for chunk in events(streamed.result())[:-1]]
    assert {name: list(chain(*(one[name] for one in objects if one))) for name in COMPLETION} == COMPLETION


def test_log_probabilities_cover_a_stop_string_too(front: FrontProcess, pool: ThreadPoolExecutor) -> None:
    call, (submit,) = begin(front, pool, "/v1/completions", 1, prompt="x", logprobs=0, stop="ST")
    for byte in b"a ST":
        front.peer.emit(submit.request, byte_token(byte), None, Logprobs(-1.0))
    front.peer.next_cancel()
    body = call.result().json()
    assert body["choices"][0]["text"] == "a "
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", " ", "S", "T"]
    assert body["usage"]["completion_tokens"] == 4


def test_nothing_is_reported_that_was_not_asked_for(front: FrontProcess, pool: ThreadPoolExecutor) -> None:
    call, (submit,) = begin(front, pool, "/v1/completions", 1, prompt="x")
    assert (submit.sampling.logprobs, submit.stop_tokens) == (None, (END_TOKEN,))
    front.peer.say(submit.request, b"a", "stop")
    assert call.result().json()["choices"][0]["logprobs"] is None
