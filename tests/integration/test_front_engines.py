"""The front outlives its engine: what is lost says so, and it serves again with the next engine that fits its half."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.front.testing import REQUEST_PATH, EnginePeer, FrontProcess, events, front_build, until
from engine.wire import Load, Submit


def speak(peer: EnginePeer, submit: Submit) -> None:
    peer.say(submit.request, b"ok", "stop")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=8) as executor:
        yield executor


def healthy(front: FrontProcess) -> bool:
    return front.client.get("/health").status_code == 200


@pytest.mark.parametrize("loss", ["close", "nonsense", "replaced"])
def test_a_lost_engine_is_an_explicit_error_and_the_next_one_serves(
    tmp_path: Path, pool: ThreadPoolExecutor, loss: str
) -> None:
    with FrontProcess().serve(tmp_path / "b") as front:
        streamed = pool.submit(front.post, "/v1/completions", prompt="x", stream=True)
        first = front.peer.next_submit()
        whole = pool.submit(front.post, "/v1/completions", prompt="x")
        second = front.peer.next_submit()
        unstarted = pool.submit(front.post, "/v1/completions", prompt="x", stream=True, n=2)
        for _ in range(2):
            front.peer.next_submit()
        for submit in (first, second):
            front.peer.say(submit.request, b"ab")
        until(lambda: front.stats()["tokens_out"] == 4)
        if loss == "close":
            front.peer.connection.shutdown()
        elif loss == "nonsense":
            front.peer.connection.send({"nonsense": 1})
        else:
            front.attach()
        *_, error = events(streamed.result())
        assert error["error"]["code"] == "engine_link_lost"
        assert error["patchctl"]["generation_end"] == 1
        assert "[DONE]" not in streamed.result().text
        for call in (whole, unstarted):
            response = call.result()
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_link_lost")
            assert int(response.headers["retry-after"]) >= 1
        stats = front.stats()
        assert (stats["requests_failed"], stats["inflight"]) == (3, 0)
        assert stats["engine_up"] == (loss == "replaced")
        refused = front.post("/v1/completions", prompt="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        peer = front.attach(speak)
        until(lambda: front.stats()["engine_restarts"] == (2 if loss == "replaced" else 1))
        assert front.post("/v1/completions", prompt="x").status_code == 503  # it has not said what it serves
        peer.exchange(1)
        until(lambda: healthy(front))
        answer = front.post("/v1/completions", prompt="x").json()
        assert (answer["choices"][0]["text"], answer["patchctl"]["generation_end"]) == ("ok", 1)
        assert front.stats()["engine_up"]


def test_what_a_lost_engine_still_sends_reaches_nobody(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with FrontProcess().serve(tmp_path / "b") as front:
        old = front.peer
        lost = pool.submit(front.post, "/v1/completions", prompt="x")
        before = old.next_submit()
        new = front.attach()
        assert lost.result().status_code == 503
        new.exchange(1)
        until(lambda: front.stats()["engine_restarts"] == 1 and healthy(front))
        call = pool.submit(front.post, "/v1/completions", prompt="x")
        submit = new.next_submit()
        assert submit.request == before.request + 1  # never a number the old engine knows
        try:
            old.exchange(9)
            old.say(submit.request, b"wrong", "stop")
        except OSError:
            pass  # the front has closed its end already
        new.say(submit.request, b"right", "stop")
        assert call.result().json()["choices"][0]["text"] == "right"
        assert healthy(front)


def stage_second(front: FrontProcess, tmp_path: Path) -> None:
    assert front.stage(2, tmp_path / "b2", front_build(tmp_path / "b2", REQUEST_PATH + b"# 2\n", version="2")).ok


def test_an_engine_lost_between_staging_and_exchange_ends_on_the_old_pair(tmp_path: Path) -> None:
    with FrontProcess(speak).serve(tmp_path / "b") as front:
        stage_second(front, tmp_path)
        front.peer.close()
        until(lambda: not front.stats()["engine_up"])
        front.attach(speak).exchange(1)
        until(lambda: healthy(front))
        assert front.post("/v1/completions", prompt="x").json()["patchctl"]["generation_begin"] == 1
        assert front.release(2).data == {"responses_open": 0}
        assert [one["generation"] for one in front.stats()["paths"]] == [1]


def test_an_engine_lost_after_the_exchange_ends_on_what_the_next_engine_serves(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with FrontProcess().serve(tmp_path / "b") as front:
        stage_second(front, tmp_path)
        call = pool.submit(front.post, "/v1/completions", prompt="x", stream=True)
        submit = front.peer.next_submit()
        front.peer.say(submit.request, b"a")
        front.peer.exchange(2)
        front.peer.say(submit.request, b"b")
        until(lambda: front.stats()["active_generation"] == 2 and front.stats()["tokens_out"] == 2)
        front.peer.close()
        *_, error = events(call.result())
        assert error["patchctl"]["generation_begin"] == 1
        assert (error["error"]["code"], error["patchctl"]["generation_end"]) == ("engine_link_lost", 2)
        front.attach(speak).exchange(1)
        until(lambda: healthy(front))
        assert front.post("/v1/completions", prompt="x").json()["patchctl"]["generation_begin"] == 1


def test_a_half_that_the_front_refuses_leaves_the_old_pair_serving(tmp_path: Path) -> None:
    with FrontProcess(speak).serve(tmp_path / "b") as front:
        broken = front_build(tmp_path / "b2", REQUEST_PATH + b"\nraise RuntimeError('no')\n", version="2")
        assert front.stage(2, tmp_path / "b2", broken).code == "build_refused"
        assert front.post("/v1/completions", prompt="x").json()["patchctl"]["generation_begin"] == 1
        # An engine that exchanges all the same is not followed with the wrong half.
        front.peer.exchange(2)
        until(lambda: not healthy(front))
        assert front.post("/v1/completions", prompt="x").json()["error"]["code"] == "unavailable"
        front.peer.exchange(1)
        until(lambda: healthy(front))
        assert front.post("/v1/completions", prompt="x").status_code == 200


def test_an_engine_with_a_generation_not_held_waits_for_its_other_half(tmp_path: Path) -> None:
    with FrontProcess(speak).serve(tmp_path / "b") as front:
        front.peer.close()
        front.attach(speak).exchange(2)
        until(lambda: front.stats()["engine_restarts"] == 1)
        assert front.post("/v1/completions", prompt="x").status_code == 503
        stage_second(front, tmp_path)
        assert front.stats()["active_generation"] == 2
        assert front.post("/v1/completions", prompt="x").json()["patchctl"]["generation_begin"] == 2


def test_engines_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    def descriptors(front: FrontProcess) -> int:
        return len(os.listdir(f"/proc/{front.process.pid}/fd"))  # noqa: PTH208 - counting is all

    with FrontProcess(speak).serve(tmp_path / "b") as front:
        assert front.post("/v1/completions", prompt="x").status_code == 200
        before = descriptors(front)
        for count in range(1, 6):
            front.attach(speak).exchange(1)
            until(lambda count=count: front.stats()["engine_restarts"] == count and healthy(front))  # type: ignore[misc]
            assert front.post("/v1/completions", prompt="x").status_code == 200
        until(lambda: descriptors(front) <= before)


def test_an_attach_message_without_a_socket_is_passed_over(tmp_path: Path) -> None:
    with FrontProcess(serves=None) as front:
        front.attach_socket.send(b"A")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
            socket.send_fds(front.attach_socket, [b"A"], [datagram.fileno()])
        front.attach(speak).exchange(1)
        front.serve(tmp_path / "b")
        assert front.post("/v1/completions", prompt="x").status_code == 200


def test_counters_go_on_across_engines(tmp_path: Path) -> None:
    def load(queries: int) -> Load:
        return Load(1, 0, 100, 25, queries, queries // 2, 3, 0, 7)

    def sample(front: FrontProcess, name: str) -> float:
        page = front.client.get("/metrics").text
        return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"patchctl_{name} "))

    with FrontProcess(speak).serve(tmp_path / "b") as front:
        front.peer.connection.send(load(100))
        until(lambda: sample(front, "prefix_cache_queries_total") == 100)
        assert sample(front, "kv_cache_usage_perc") == 0.25
        front.peer.close()
        until(lambda: sample(front, "engine_up") == 0)
        assert (sample(front, "prefix_cache_queries_total"), sample(front, "kv_cache_usage_perc")) == (100, 0)
        front.attach(speak).connection.send(load(10))
        until(lambda: sample(front, "prefix_cache_queries_total") == 110)
        assert (sample(front, "prefix_cache_hits_total"), sample(front, "num_preemptions_total")) == (55, 6)
        assert (sample(front, "engine_restarts_total"), sample(front, "engine_up")) == (1, 1)
