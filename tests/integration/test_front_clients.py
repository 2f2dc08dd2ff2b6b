"""Clients that leave, do not read, or are too many: none of them costs the others anything, or memory."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.front.admission import QueueLimits
from engine.front.inflight import BACKLOG_MAX
from engine.front.testing import FrontProcess, byte_token, until
from engine.wire import Submit, Token, Tokens

WAITING_MAX = QueueLimits().sequences
COMPLETIONS = "/v1/completions"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=WAITING_MAX + 8) as executor:
        yield executor


def connect(front: FrontProcess, **body: Any) -> socket.socket:
    """A client that has sent its request and reads nothing by itself."""
    host, port = front.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    client = socket.socket()
    # The kernel would otherwise take megabytes for it.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect((host, int(port)))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    return client


def resident_kib(front: FrontProcess) -> int:
    rollup = Path(f"/proc/{front.process.pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Rss:")).split()[1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_leaves_is_cancelled(tmp_path: Path, stream: bool, tokens: int, choices: int) -> None:
    with FrontProcess().serve(tmp_path / "b") as front:
        with connect(front, prompt="x", stream=stream, max_tokens=50, n=choices) as client:
            submits = [front.peer.next_submit() for _ in range(choices)]
            front.peer.say(submits[0].request, b"abc"[:tokens])
            if stream and tokens:
                assert client.recv(1) == b"H"
        cancelled = {front.peer.next_cancel().request for _ in range(choices)}
        assert cancelled == {submit.request for submit in submits}
        until(lambda: front.stats()["requests_cancelled"] == 1)
        stats = front.stats()
        assert (stats["inflight"], stats["paths"][0]["responses_open"], stats["requests_failed"]) == (0, 0, 0)


def test_only_what_still_runs_is_cancelled(tmp_path: Path) -> None:
    with FrontProcess().serve(tmp_path / "b") as front:
        with connect(front, prompt="x", stream=True, n=2) as client:
            first, second = (front.peer.next_submit() for _ in range(2))
            front.peer.say(first.request, b"abc", "stop")
            assert client.recv(1) == b"H"
        assert front.peer.next_cancel().request == second.request
        until(lambda: front.stats()["requests_cancelled"] == 1)
        assert front.peer.cancels.empty()


def flood(front: FrontProcess, submit: Submit, tokens: int, per_message: int = 500) -> None:
    """Generate much at once."""
    token = Token(submit.request, byte_token(ord("x")))
    for _ in range(tokens // per_message):
        front.peer.connection.send(Tokens(1, (token,) * per_message))


def test_a_client_that_never_reads_stalls_nobody_and_costs_bounded_memory(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with FrontProcess().serve(tmp_path / "b") as front:
        with connect(front, prompt="x", stream=True, max_tokens=400) as warm:
            flood(front, front.peer.next_submit(), 2 * BACKLOG_MAX)
            front.peer.next_cancel()
            assert warm.recv(1) == b"H"
        until(lambda: front.stats()["inflight"] == 0)
        before_kib = resident_kib(front)
        clients = [connect(front, prompt="x", stream=True, max_tokens=400) for _ in range(3)]
        stuck = [front.peer.next_submit() for _ in clients]
        for submit in stuck:
            flood(front, submit, 2 * BACKLOG_MAX)
            assert front.peer.next_cancel().request == submit.request
            # What the engine had under way when it was cancelled must not pile up either.
            flood(front, submit, 4 * BACKLOG_MAX)
        # Others go on at once.
        call = pool.submit(front.post, COMPLETIONS, prompt="x", stream=True)
        front.peer.say(front.peer.next_submit().request, b"quick", "stop")
        assert call.result().text.endswith("[DONE]\n\n")
        # A backlog is at most 1.6 MB each, and it is dropped; what stays is the transport's 64 KiB.
        assert resident_kib(front) - before_kib < 3 * 2048
        # One that reads after all is told; the others leave.
        text = b""
        while chunk := clients[0].recv(1 << 16):
            text += chunk
            if b"client_too_slow" in text:
                break
        assert b"[DONE]" not in text
        for client in clients:
            client.close()
        until(lambda: front.stats()["paths"][0]["responses_open"] == 0)
        stats = front.stats()
        assert (stats["requests_failed"], stats["requests_completed"]) == (0, 1)


def test_a_client_that_takes_nothing_loses_its_connection_in_the_end(tmp_path: Path) -> None:
    hurry = "import engine.front.process as p; p._STALLED_MS_MAX = 300"
    with FrontProcess(before=hurry).serve(tmp_path / "b") as front:
        client = connect(front, prompt="x", stream=True, max_tokens=400)
        submit = front.peer.next_submit()
        flood(front, submit, BACKLOG_MAX // 2)
        # It never closes, yet its response ends and the generation it held is free.
        until(lambda: front.stats()["requests_cancelled"] == 1)
        assert front.peer.next_cancel().request == submit.request
        assert front.stats()["paths"][0]["responses_open"] == 0
        client.close()


def test_more_waiting_than_the_limit_are_told_when_to_retry(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with FrontProcess().serve(tmp_path / "b") as front:
        calls = [pool.submit(front.post, COMPLETIONS, prompt="x") for _ in range(WAITING_MAX)]
        submits = [front.peer.next_submit() for _ in range(WAITING_MAX)]
        response = front.post(COMPLETIONS, prompt="x")
        # Nothing has ended yet: the longest wait.
        assert (response.status_code, response.headers["retry-after"]) == (429, "60")
        assert (response.json()["error"]["code"], response.json()["error"]["type"]) == (
            "queue_full",
            "rate_limit_error",
        )
        assert f"patchctl_num_requests_waiting {WAITING_MAX}\n" in front.client.get("/metrics").text
        # One that the engine begins makes room, before its first token.
        front.peer.admit(submits[0].request)
        until(lambda: "patchctl_num_requests_running 1\n" in front.client.get("/metrics").text)
        assert front.post(COMPLETIONS, prompt="x", n=2).status_code == 429
        calls.append(pool.submit(front.post, COMPLETIONS, prompt="x"))
        submits.append(front.peer.next_submit())
        for submit in submits:
            front.peer.emit(submit.request, byte_token(65), "length")
        assert {call.result().status_code for call in calls} == {200}
        page = front.client.get("/metrics").text
        assert "patchctl_num_requests_waiting 0\n" in page
        assert f'patchctl_request_success_total{{finished_reason="length"}} {WAITING_MAX + 1}\n' in page
        assert 'patchctl_request_rejected_total{reason="queue_full"} 2\n' in page
        assert f"patchctl_time_to_first_token_seconds_count {WAITING_MAX + 1}\n" in page
        # Now much has ended just now.
        calls = [pool.submit(front.post, COMPLETIONS, prompt="x") for _ in range(WAITING_MAX)]
        submits = [front.peer.next_submit() for _ in range(WAITING_MAX)]
        assert int(front.post(COMPLETIONS, prompt="x").headers["retry-after"]) < 60
        for submit in submits:
            front.peer.emit(submit.request, -1, "stop")
        assert {call.result().status_code for call in calls} == {200}
        assert "patchctl_num_requests_waiting 0\n" in front.client.get("/metrics").text


def test_prompt_tokens_that_wait_are_limited_too(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    few = """
import engine.front.process as p, engine.front.admission as a
p.AdmissionQueue = lambda start_s: a.AdmissionQueue(start_s, a.QueueLimits(64, 100))
"""
    with FrontProcess(before=few).serve(tmp_path / "b") as front:
        alone = pool.submit(front.post, COMPLETIONS, prompt="x" * 200)
        large = front.peer.next_submit()
        assert front.post(COMPLETIONS, prompt="x").status_code == 429
        front.peer.emit(large.request, -1, "stop")
        assert alone.result().status_code == 200
        small = pool.submit(front.post, COMPLETIONS, prompt="x" * 50)
        submit = front.peer.next_submit()
        assert front.post(COMPLETIONS, prompt="x" * 51).status_code == 429
        front.peer.emit(submit.request, -1, "stop")
        assert small.result().status_code == 200
