"""A real front and a real engine: options change tokens as they should, and the front outlives the engine."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.attach import send_data_socket
from engine.build import RuntimeOptions
from engine.front.testing import (
    REQUEST_PATH,
    TINY_VOCABULARY,
    FrontProcess,
    byte_token,
    events,
    tiny_tokenizer_files,
    until,
)
from engine.process_testing import EngineProcess
from engine.testing import tiny_build
from engine.wire import Stage

PROMPT = "tell me something about the sea and the sky, please"
RUNTIME = RuntimeOptions(batch_sizes=(1, 2, 4), contexts=(64, 256), prefill_chunk_tokens=16)
COMPLETIONS = "/v1/completions"
# ASCII alone: no end token, so every answer has its full length, and no two tokens look alike.
ASCII = {str(token): -100 for token in range(TINY_VOCABULARY) if not byte_token(0) <= token < byte_token(128)}


class Pair:
    """A front and the engine attached to it, serving one build."""

    def __init__(self, folder: Path) -> None:
        files = {**tiny_tokenizer_files(), "request_path.py": REQUEST_PATH}
        self.folder = folder
        self.manifest = tiny_build(
            folder, seed=1, version="1", vocab=TINY_VOCABULARY, extra_files=files, runtime=RUNTIME
        )
        self.front = FrontProcess(serves=None)
        assert self.front.stage(1, folder, self.manifest).ok
        self.engine = EngineProcess()
        self.join()

    def join(self) -> None:
        """Give both ends of a new data socket away, and serve."""
        here, there = socket.socketpair()
        with here, there:
            send_data_socket(self.front.attach_socket, here)
            send_data_socket(self.engine.attach_socket, there)
        self.engine.ok(Stage(1, str(self.folder), self.manifest.digest))
        until(lambda: self.front.client.get("/health").status_code == 200, seconds=60)

    def replace_engine(self) -> None:
        """Kill the engine and start another."""
        self.engine.process.kill()
        self.engine.close()
        until(lambda: not self.front.stats()["engine_up"])
        self.engine = EngineProcess()

    def post(self, **body: Any) -> httpx.Response:
        return self.front.post(COMPLETIONS, **{"prompt": PROMPT, "logit_bias": ASCII, "temperature": 0, **body})

    def close(self) -> None:
        self.front.__exit__(None, None, None)
        self.engine.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair") / "build")
    yield pair
    pair.close()


def tokens(response: httpx.Response, choice: int = 0) -> list[str]:
    found: list[str] = response.json()["choices"][choice]["logprobs"]["tokens"]
    return found


def test_greedy_tokens_are_the_likeliest_and_repeat(pair: Pair) -> None:
    body = pair.post(max_tokens=20, logprobs=2, logit_bias={}).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"]
    for chosen, alternatives in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert 0 > chosen == max(alternatives.values())
    assert pair.post(max_tokens=20, logprobs=2, logit_bias={}).json()["choices"] == body["choices"]


def test_a_prompt_that_was_seen_comes_from_the_cache(pair: Pair) -> None:
    pair.post(max_tokens=1)
    usage = pair.post(max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    assert 16 <= usage["prompt_tokens_details"]["cached_tokens"] < len(PROMPT)
    until(lambda: "patchctl_prefix_cache_hits_total 0\n" not in pair.front.client.get("/metrics").text)


def test_choices_with_a_seed_are_those_of_single_requests(pair: Pair) -> None:
    asked = {"max_tokens": 12, "temperature": 1.0, "logprobs": 0}
    together = pair.post(**asked, n=3, seed=40)
    alone = [tokens(pair.post(**asked, seed=40 + index)) for index in range(3)]
    assert [tokens(together, index) for index in range(3)] == alone
    assert len({tuple(one) for one in alone}) == 3
    assert together.json()["usage"]["completion_tokens"] == 36


def test_bias_penalty_and_top_k_change_tokens(pair: Pair) -> None:
    forced = pair.post(max_tokens=5, logprobs=0, logit_bias={"100": 100})
    assert set(tokens(forced)) == {"a"}
    assert len(set(tokens(pair.post(max_tokens=40, logprobs=0)))) < 40
    assert len(set(tokens(pair.post(max_tokens=40, logprobs=0, presence_penalty=2, frequency_penalty=2)))) == 40
    greedy = tokens(pair.post(max_tokens=12, logprobs=0))
    assert tokens(pair.post(max_tokens=12, logprobs=0, temperature=1.5, top_k=1)) == greedy
    assert tokens(pair.post(max_tokens=12, logprobs=0, temperature=1.5, min_p=1)) == greedy


def test_a_client_that_leaves_frees_the_engine(pair: Pair) -> None:
    cancelled, left = pair.engine.stats()["requests_cancelled"], pair.front.stats()["requests_cancelled"]
    # Held, so that it cannot be done before the client has left.
    pair.engine.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(httpx.ReadTimeout):
            pair.front.client.post(COMPLETIONS, json={"prompt": "x", "n": 8, "logit_bias": ASCII}, timeout=0.5)
        until(lambda: pair.front.stats()["requests_cancelled"] == left + 1)
    finally:
        pair.engine.process.send_signal(signal.SIGCONT)
    until(lambda: pair.engine.stats()["requests_cancelled"] == cancelled + 8)
    stats = pair.engine.stats()
    assert (stats["running"], stats["waiting"], pair.front.stats()["inflight"]) == (0, 0, 0)


def test_the_front_outlives_an_engine_that_is_killed(pair: Pair) -> None:
    expected = pair.post(max_tokens=20).json()["choices"]
    pid = pair.front.process.pid
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(pair.post, max_tokens=200, stream=True) for _ in range(4)]
        until(lambda: pair.front.stats()["inflight"] == 4)
        pair.replace_engine()
        for call in calls:
            response = call.result()
            last = events(response)[-1] if response.status_code == 200 else response.json()
            assert last["error"]["code"] == "engine_link_lost"
    assert pair.post(max_tokens=1).status_code == 503
    pair.join()
    stats = pair.front.stats()
    assert (stats["requests_failed"], stats["engine_restarts"], stats["inflight"]) == (4, 1, 0)
    assert pair.front.process.pid == pid
    assert pair.front.process.poll() is None
    assert pair.post(max_tokens=20).json()["choices"] == expected
