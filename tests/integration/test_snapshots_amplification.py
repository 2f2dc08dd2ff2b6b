"""Three ways to keep a request's memory: each shows as growth per request, and its sound twin does not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from snapshots.capture.pages import WriteTracker
from snapshots.capture.probe import probe
from snapshots.capture.process import capture_process, sample_memory
from snapshots.diff import diff_process
from snapshots.growth import GrowthEstimate, MemorySample, estimate_growth
from snapshots.verdict import VerdictLimits

_TRACKING = probe().write_tracking
_PAYLOAD_BYTES = 64 << 10
_REQUESTS = 16
_NOISE = VerdictLimits().growth_noise_bytes_per_request

# Serves one request per line. With "fault" it keeps what the sound twin lets go; the work is the same.
_SERVER = """
import contextvars, copy, json, sys
from snapshots.capture.heap import release_free_heap
from snapshots.capture.uffd import arm_self

fault, kept = sys.argv[2] == "fault", []
rows = [{"id": n, "text": f"item {n}", "tags": ["a", "b"]} for n in range(1024)]
payload = json.dumps(rows).encode().ljust(65536)[:65536].ljust(65536)
wire = json.dumps({"rows": rows}).encode()
current = contextvars.ContextVar("request")

def copies():
    # decode, map, encode again; an audit log keeps all three
    decoded = json.loads(wire)
    mapped = copy.deepcopy(decoded)
    encoded = json.dumps(mapped).encode()
    if fault:
        kept.append((decoded, mapped, encoded))
    return len(encoded)

def closures():
    # the completion callback and the request's context capture the body instead of its length
    body = bytearray(payload)
    size = len(body)
    current.set(body if fault else size)
    if fault:
        kept.append((lambda: len(body), contextvars.copy_context()))
    else:
        (lambda: size)()
    return size

def stream():
    # a wrapper around the response remembers the chunks that it passed on
    seen = []
    def wrapped(chunks):
        for chunk in chunks:
            if fault:
                seen.append(chunk)
            yield chunk
    total = sum(len(chunk) for chunk in wrapped(bytes(8192) for _ in range(8)))
    if fault:
        kept.append(seen)
    return total

request = {"copies": copies, "closures": closures, "stream": stream}[sys.argv[1]]
for line in sys.stdin:
    command = line.strip()
    print(release_free_heap() if command == "trim" else arm_self().armed if command == "arm" else request(), flush=True)
"""

_NAMES = ("copies", "closures", "stream")


@contextlib.contextmanager
def _server(name: str, twin: str) -> Iterator[tuple[int, Callable[[str], str]]]:
    command = [sys.executable, "-P", "-c", _SERVER, name, twin]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert popen.stdin is not None
    assert popen.stdout is not None
    sink, source = popen.stdin, popen.stdout

    def call(what: str) -> str:
        sink.write(what + "\n")
        sink.flush()
        answer = source.readline().strip()
        assert answer, "the server died"
        return answer

    try:
        for _ in range(3):
            call("request")
        call("trim")
        yield popen.pid, call
    finally:
        popen.kill()
        popen.communicate()


def _serve(pid: int, call: Callable[[str], str]) -> list[MemorySample]:
    samples = []
    for done in range(_REQUESTS):
        samples.append(sample_memory(pid, requests_completed=done, tokens=40 * done))
        call("request")
    samples.append(sample_memory(pid, requests_completed=_REQUESTS, tokens=40 * _REQUESTS))
    return samples


@pytest.mark.skipif(not _TRACKING.available, reason=_TRACKING.detail)
@pytest.mark.parametrize("name", _NAMES)
def test_fault_shows_as_growth_and_as_new_memory(name: str) -> None:
    with _server(name, "fault") as (pid, call):
        assert call("arm") == "True"
        with WriteTracker(pid) as tracker:
            before = capture_process(pid, "front", tracker=tracker)
            growth = estimate_growth(_serve(pid, call))
            after = capture_process(pid, "front", tracker=tracker)
    assert isinstance(growth, GrowthEstimate)
    assert growth.low > _NOISE
    assert growth.bytes_per_request > 0.9 * _PAYLOAD_BYTES
    kept = 0.9 * _PAYLOAD_BYTES * _REQUESTS
    events = diff_process(before, after).regions
    assert sum(c.bytes for c in events if c.event in ("new", "grown")) > kept
    assert after.anonymous_bytes - before.anonymous_bytes > kept


@pytest.mark.parametrize("name", _NAMES)
def test_sound_twin_stays_below_the_noise_floor_in_ten_runs(name: str) -> None:
    for _ in range(10):
        with _server(name, "sound") as (pid, call):
            growth = estimate_growth(_serve(pid, call))
        assert isinstance(growth, GrowthEstimate)
        assert growth.high < _NOISE
