"""The front as a process: HTTP on one side, a scripted engine and the agent on the others."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.build import BuildManifest
from engine.front.testing import END_TOKEN, EnginePeer, FrontProcess, byte_token, events, front_build, until
from engine.wire import Arm, Stop, Submit, Swap

SOUND = (resources.files("patchctl.demo.paths") / "request_path_1_0_1.py").read_bytes()
FAULTY = (resources.files("patchctl.demo.paths") / "request_path_1_0_0.py").read_bytes()
TEXT = "héllo 🌍 wörld"


def speak(peer: EnginePeer, submit: Submit) -> None:
    peer.say(submit.request, TEXT.encode(), "stop")


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[Path, BuildManifest]]:
    def make(version: str = "1", source: bytes = SOUND) -> tuple[Path, BuildManifest]:
        folder = tmp_path / f"build-{version}"
        return folder, front_build(folder, source, version=version)

    return make


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=8) as executor:
        yield executor


def started(build: Callable[..., Any], on_submit: Callable[[EnginePeer, Submit], None] | None = None) -> FrontProcess:
    front = FrontProcess(on_submit)
    assert front.stage(1, *build()).ok
    until(lambda: front.stats()["active_generation"] == 1)
    return front


def test_whole_and_streamed_answers_agree(build: Callable[..., Any]) -> None:
    with started(build, speak) as front:
        whole = front.post("/v1/completions", prompt="hi", max_tokens=100, model="tiny")
        streamed = front.post(
            "/v1/completions", prompt="hi", max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
        chat = front.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        chat_streamed = front.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], stream=True)
        answer = whole.json()
        assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
        assert answer["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 18,
            "total_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        origin = answer["patchctl"]
        assert (origin["generation_begin"], origin["generation_end"]) == (1, 1)
        assert whole.headers["x-patchctl-generation"] == streamed.headers["x-patchctl-generation"] == "1"
        *chunks, last, usage, done = events(streamed)
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in [*chunks, last]) == TEXT
        assert all("\ufffd" not in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["patchctl"] == usage["patchctl"] == origin
        assert (usage["choices"], usage["usage"]) == ([], answer["usage"])
        assert chat.json()["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
        opening, *deltas = events(chat_streamed)[:-1]
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(delta["choices"][0]["delta"].get("content", "") for delta in deltas) == TEXT
        assert front.stats()["requests_completed"] == 4
        assert front.peer.cancels.empty()


def test_what_reaches_the_engine(build: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    with started(build) as front:
        pool.submit(front.post, "/v1/completions", prompt="hi", max_tokens=7, temperature=0.5, top_p=0.9, seed=3)
        submit = front.peer.next_submit()
        assert submit.prompt == (byte_token(ord("h")), byte_token(ord("i")))
        assert (submit.tokens_max, submit.stop_tokens) == (7, (END_TOKEN,))
        assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.seed) == (0.5, 0.9, 3)
        front.peer.emit(submit.request, -1, "stop")
        pool.submit(front.post, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
        chat = front.peer.next_submit()
        assert bytes(token - 3 for token in chat.prompt if token > END_TOKEN) == b"user\na\nassistant\n"
        assert [token for token in chat.prompt if token <= END_TOKEN] == [1, 2, 1]
        assert chat.tokens_max == 512 - len(chat.prompt)
        front.peer.emit(chat.request, -1, "stop")
        pool.submit(front.post, "/v1/completions", prompt=[5, 6])
        ids = front.peer.next_submit()
        assert (ids.prompt, ids.tokens_max) == ((5, 6), 16)
        front.peer.emit(ids.request, -1, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_cancels_and_ends(build: Callable[..., Any], stream: bool) -> None:
    def say_without_end(peer: EnginePeer, submit: Submit) -> None:
        peer.say(submit.request, b"one two STO STOP three")

    with started(build, say_without_end) as front:
        response = front.post("/v1/completions", prompt="x", max_tokens=100, stop=["never", "STOP"], stream=stream)
        assert front.peer.next_cancel().request == 1
        if stream:
            chunks = events(response)[:-1]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two STO "
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            choice = response.json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("one two STO ", "stop")
        assert front.stats()["requests_completed"] == 1


def test_held_back_text_and_a_cut_character_come_out_at_the_end(build: Callable[..., Any]) -> None:
    def speak_partly(peer: EnginePeer, submit: Submit) -> None:
        peer.say(submit.request, b"ab ST" if submit.request == 1 else b"ab\xf0\x9f", "length")

    with started(build, speak_partly) as front:
        texts = []
        for _ in range(2):
            choice = front.post("/v1/completions", prompt="x", stop="STOP").json()["choices"][0]
            assert choice["finish_reason"] == "length"
            texts.append(choice["text"])
        assert texts == ["ab ST", "ab\ufffd"]


def test_an_exchange_in_mid_response(build: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    marked = SOUND.replace(b'_SUFFIX = b"\\n\\n"', b'_SUFFIX = b"\\n\\n"\n_COMMENT = b": two"')
    with started(build) as front:
        first: Future[httpx.Response] = pool.submit(front.post, "/v1/completions", prompt="x", stream=True)
        submit = front.peer.next_submit()
        front.peer.say(submit.request, b"ab")
        folder, manifest = build("2", marked)
        assert front.stage(2, folder, manifest).data == {"generation": 2, "active": False}
        assert front.client.get("/health").json()["generation"] == 1
        front.peer.exchange(2)
        until(lambda: front.client.get("/health").json()["generation"] == 2)
        assert "patchctl_swaps_total 1\n" in front.client.get("/metrics").text
        second: Future[httpx.Response] = pool.submit(front.post, "/v1/completions", prompt="x")
        late = front.peer.next_submit()
        front.peer.say(late.request, b"z", "stop")
        assert second.result().json()["patchctl"] == {
            "generation_begin": 2,
            "generation_end": 2,
            "build": manifest.digest,
        }
        assert front.release(1).data == {"responses_open": 1}
        assert [one["generation"] for one in front.stats()["paths"]] == [1, 2]
        third = build("3")
        assert front.stage(3, *third).code == "generation_limit"
        front.peer.say(submit.request, b"cd", "stop")
        response = first.result()
        *chunks, _done = events(response)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcd"
        assert response.headers["x-patchctl-generation"] == "1"
        origin = chunks[-1]["patchctl"]
        assert (origin["generation_begin"], origin["generation_end"]) == (1, 2)
        assert origin["build"] != manifest.digest
        until(lambda: [one["generation"] for one in front.stats()["paths"]] == [2])
        assert front.stage(3, *third).ok


def test_requests_that_are_refused(build: Callable[..., Any]) -> None:
    with started(build, speak) as front:
        cases: list[tuple[dict[str, Any], int, str | None]] = [
            ({"prompt": "x", "max_tokens": "many"}, 400, None),
            ({"prompt": "x", "n": 9}, 400, None),
            ({"prompt": "x", "echo": True}, 400, "unsupported_parameter"),
            ({"prompt": "x", "logit_bias": {"288": 1}}, 400, None),
            ({"prompt": ""}, 400, None),
            ({"prompt": [288]}, 400, None),
            ({"prompt": [-1]}, 400, None),
            ({"prompt": "x", "model": "other"}, 404, "model_not_found"),
            ({"prompt": "x" * 512, "max_tokens": 1}, 400, "context_length_exceeded"),
            ({"prompt": "x" * 100_000}, 400, "context_length_exceeded"),
            ({"prompt": "x", "max_tokens": 512}, 400, "context_length_exceeded"),
            ({"prompt": "x" * (1 << 20)}, 413, "body_too_large"),
        ]
        for body, status, code in cases:
            response = front.post("/v1/completions", **body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (status, code), body
            assert len(response.headers["x-request-id"]) == 32
            assert set(error) == {"message", "type", "param", "code"}
        assert "512 tokens" in front.post("/v1/completions", prompt="x" * 600).json()["error"]["message"]
        assert "616 tokens (600 in the prompt" in front.post("/v1/completions", prompt="x" * 600).text
        for path, status in (("/v1/completions", 405), ("/nowhere", 404)):
            response = front.client.get(path)
            assert (response.status_code, set(response.json()["error"])) == (
                status,
                {"message", "type", "param", "code"},
            )
            assert len(response.headers["x-request-id"]) == 32
        stats = front.stats()
        assert (stats["requests_rejected"], stats["requests_completed"]) == (len(cases) + 2, 0)
        assert stats["paths"][0]["responses_open"] == 0
        assert front.post("/v1/completions", prompt="x" * 496).status_code == 200


@pytest.mark.parametrize("finish", ["error", "cancelled"])
def test_what_the_engine_gives_up_is_an_explicit_error(build: Callable[..., Any], finish: Any) -> None:
    def give_up(peer: EnginePeer, submit: Submit) -> None:
        peer.say(submit.request, b"ab", finish)

    with started(build, give_up) as front:
        *_, error = events(front.post("/v1/completions", prompt="x", stream=True))
        assert error["error"]["code"] == f"engine_{finish}"
        assert front.post("/v1/completions", prompt="x").status_code == 503
        assert front.stats()["requests_failed"] == 2


def test_a_writer_that_raises_ends_only_its_response(build: Callable[..., Any], tmp_path: Path) -> None:
    source = SOUND.replace(
        b"        size = len(_PREFIX)",
        b'        if b"b" in data[-120:]:\n            raise OSError\n        size = len(_PREFIX)',
    )
    with FrontProcess(lambda peer, submit: peer.say(submit.request, b"xyz{", "stop")) as front:
        folder = tmp_path / "build"
        assert front.stage(1, folder, front_build(folder, source)).ok
        *_, error = events(front.post("/v1/completions", prompt="x", stream=True))
        assert error["error"]["code"] == "request_path_failed"
        assert front.post("/v1/completions", prompt="x").status_code == 200
        stats = front.stats()
        assert (stats["requests_failed"], stats["requests_completed"]) == (1, 1)
        assert stats["paths"][0]["responses_open"] == 0


def test_request_ids(build: Callable[..., Any]) -> None:
    with started(build, speak) as front:
        for given, kept in (("abc-1", True), ("x" * 129, False), ("a b", False)):
            response = front.client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": given})
            assert (response.headers["x-request-id"] == given) == kept
        refused = front.client.post("/v1/completions", content=b"{", headers={"x-request-id": "abc"})
        assert (refused.status_code, refused.headers["x-request-id"]) == (400, "abc")


def test_nothing_is_served_before_a_generation_is_staged(build: Callable[..., Any]) -> None:
    with FrontProcess(speak) as front:
        assert front.client.get("/health").status_code == 503
        assert front.client.get("/v1/models").json()["data"] == []
        assert front.post("/v1/completions", prompt="x").status_code == 503
        folder, manifest = build()
        (folder / "request_path.py").write_bytes(SOUND + b"\n")
        reply = front.stage(1, folder, manifest)
        assert reply.code == "build_refused"
        assert "request_path.py does not match its sha256" in reply.what
        assert front.client.get("/health").status_code == 503
        (folder / "request_path.py").write_bytes(SOUND)
        assert front.stage(1, folder, manifest).ok
        assert front.stage(1, folder, manifest).ok
        assert front.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        front.peer.exchange(9)
        until(lambda: front.client.get("/health").status_code == 503)
        front.peer.exchange(1)
        until(lambda: front.client.get("/health").status_code == 200)


def test_control_messages_always_get_a_reply(build: Callable[..., Any]) -> None:
    with started(build) as front:
        assert front.call(Arm()).data == {"armed": True}
        assert front.call(Swap(2)).code == "not_for_front"
        assert front.release(7).code == "generation_unknown"
        assert front.release(1).code == "generation_active"
        front.control.send({"type": "Unknown"})
        frame = front.control.recv()
        assert frame is not None
        assert b"bad_message" in frame


def test_stop_lets_responses_end(build: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    with started(build) as front:
        call = pool.submit(front.post, "/v1/completions", prompt="x", stream=True)
        submit = front.peer.next_submit()
        front.peer.say(submit.request, b"ab")
        assert front.call(Stop()).ok
        front.peer.say(submit.request, b"cd", "stop")
        assert events(call.result())[-1] == "[DONE]"
        assert front.process.wait(20) == 0


@pytest.mark.parametrize("end", ["agent_gone", "sigterm"])
def test_the_agents_end_or_a_signal_ends_the_process(build: Callable[..., Any], end: str) -> None:
    with started(build) as front:
        if end == "sigterm":
            front.process.send_signal(signal.SIGTERM)
        else:
            front.control.shutdown()
        assert front.process.wait(20) == 0


def test_the_sound_path_does_not_grow_and_the_faulty_one_does(build: Callable[..., Any]) -> None:
    def resident_kib(front: FrontProcess) -> int:
        line = next(
            line
            for line in Path(f"/proc/{front.process.pid}/smaps_rollup").read_text().splitlines()
            if line.startswith("Rss:")
        )
        return int(line.split()[1])

    growth = []
    for version, source in (("faulty", FAULTY), ("sound", SOUND)):
        with FrontProcess(speak) as front:
            assert front.stage(1, *build(version, source)).ok
            for _ in range(100):
                front.post("/v1/completions", prompt="x", stream=True)
            before = resident_kib(front)
            for _ in range(100):
                front.post("/v1/completions", prompt="x", stream=True)
            growth.append((resident_kib(front) - before) / 100)
            if version == "faulty":
                high = resident_kib(front)
                assert front.stage(2, *build("sound-2", SOUND)).ok
                front.peer.exchange(2)
                front.post("/v1/completions", prompt="x", stream=True)
                assert front.release(1).ok
                until(lambda front=front, high=high: high - resident_kib(front) > 100 * 15 * 16)  # type: ignore[misc]
    assert growth[0] > 15 * 16
    assert growth[1] < 4


def test_importing_the_front_is_light() -> None:
    code = "import sys, engine.front.process; print(' '.join(sys.modules))"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert not {"torch", "numpy", "transformers", "safetensors", "tokenizers", "jinja2"} & set(out)
