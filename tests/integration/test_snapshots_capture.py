"""Captures of real child processes: what was written is found, what can't be seen is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from snapshots.capture import process as process_module
from snapshots.capture import uffd
from snapshots.capture.errors import CaptureError, ProcessGoneError
from snapshots.capture.pages import PagemapScanner, WriteTracker
from snapshots.capture.probe import probe
from snapshots.capture.process import capture_process, sample_memory
from snapshots.capture.reader import PageNumbers
from snapshots.capture.vmas import Mapping, Usage, read_smaps
from snapshots.diff import ProcessDiff, diff_process
from snapshots.growth import GrowthEstimate, MemorySample, estimate_growth
from snapshots.model import PAGE_BYTES, ProcessSnapshot, Region

_TRACKING = probe().write_tracking
tracking = pytest.mark.skipif(not _TRACKING.available, reason=_TRACKING.detail)

# Runs one statement per line and answers with `r`. Pages are written as bytes that are never zero.
_CHILD = """
import ctypes, mmap, os, sys
from snapshots.capture.heap import release_free_heap
from snapshots.capture.uffd import arm_self
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = libc.mprotect.argtypes = libc.memset.argtypes = None
def new(pages):
    # Own address range: guard pages keep neighbours from merging with it.
    base = libc.mmap(None, (pages + 2) * 4096, 0, 0x22, -1, 0) + 4096
    assert libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(pages * 4096), 3) == 0
    assert libc.madvise(ctypes.c_void_p(base), ctypes.c_size_t(pages * 4096), 15) == 0
    return base
def put(base, pages, value):
    for page in pages:
        ctypes.memset(base + page * 4096 + 7, value, 1)
env = dict(globals())
for line in sys.stdin:
    env['r'] = ''
    exec(line, env)
    print(env['r'], flush=True)
"""


@dataclass
class Child:
    popen: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def run(self, statement: str) -> str:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(statement + "\n")
        self.popen.stdin.flush()
        answer = self.popen.stdout.readline()
        assert answer, "the child died"
        return answer.strip()

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    popen = subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    started = Child(popen)
    started.run("")  # imports are done
    yield started
    started.end()


def region_at(snapshot: ProcessSnapshot, address: int) -> Region:
    return next(r for r in snapshot.regions if r.start <= address < r.end)


def page_offsets(region: Region, base: int) -> list[int]:
    return [int(n) - base // PAGE_BYTES for n in np.frombuffer(region.pages.numbers, dtype="<u8")]


def event_bytes(diff: ProcessDiff, base: int, event: str) -> int:
    return sum(c.bytes for c in diff.regions if c.event == event and c.start <= base < c.end)


@tracking
def test_planted_pages_are_found_by_tracking_and_by_hashing_alike(child: Child) -> None:
    base = int(child.run("b = new(3000); put(b, range(3000), 1); r = b"))
    child.run("arm_self()")
    planted = sorted({0, 1, 2, 511, 512, 1023, 2999, *range(7, 2999, 97)})
    with WriteTracker(child.pid) as tracker:
        first = capture_process(child.pid, "engine", tracker=tracker)
        hashed_before = capture_process(child.pid, "engine")
        child.run(f"put(b, {planted}, 2)")
        second = capture_process(child.pid, "engine", tracker=tracker)
        hashed_after = capture_process(child.pid, "engine")

    tracked = region_at(second, base)
    assert (tracked.method, tracked.confidence) == ("write_tracking", "exact")
    assert page_offsets(tracked, base) == planted

    old, new = region_at(hashed_before, base), region_at(hashed_after, base)
    assert (new.method, new.confidence) == ("page_hash", "exact")
    assert page_offsets(new, base) == list(range(3000))
    changed = np.flatnonzero(
        np.frombuffer(old.pages.digests, dtype="<u8") != np.frombuffer(new.pages.digests, dtype="<u8")
    )
    assert changed.tolist() == planted
    for pair in ((first, second), (hashed_before, hashed_after)):
        assert event_bytes(diff_process(*pair), base, "changed") == len(planted) * PAGE_BYTES


@tracking
def test_more_runs_than_one_scan_returns(child: Child) -> None:
    base = int(child.run("b = new(10000); put(b, range(10000), 1); arm_self(); r = b"))
    with WriteTracker(child.pid) as tracker:
        capture_process(child.pid, "engine", tracker=tracker)
        child.run("put(b, range(0, 10000, 2), 2)")
        found = region_at(capture_process(child.pid, "engine", tracker=tracker), base)
        again = region_at(capture_process(child.pid, "engine", tracker=tracker), base)
    assert page_offsets(found, base) == list(range(0, 10000, 2))
    assert page_offsets(again, base) == []


@tracking
def test_reads_are_not_writes_and_system_calls_are(child: Child) -> None:
    base = int(child.run("b = new(3000); put(b, range(32), 1); arm_self(); r = b"))
    with WriteTracker(child.pid) as tracker:
        capture_process(child.pid, "engine", tracker=tracker)
        child.run("r = sum(ctypes.string_at(b, 3000 * 4096))")  # faults in zero pages beyond 32
        child.run("i, o = os.pipe(); os.write(o, b'x' * 8); libc.read(i, ctypes.c_void_p(b + 5 * 4096), 8)")
        found = region_at(capture_process(child.pid, "engine", tracker=tracker), base)
    assert page_offsets(found, base) == [5]


@tracking
def test_memory_given_back_has_changed(child: Child) -> None:
    base = int(child.run("b = new(64); put(b, range(64), 1); arm_self(); r = b"))
    with WriteTracker(child.pid) as tracker:
        capture_process(child.pid, "engine", tracker=tracker)
        child.run("libc.madvise(ctypes.c_void_p(b + 5 * 4096), ctypes.c_size_t(3 * 4096), 4)")
        child.run("r = ctypes.string_at(b + 6 * 4096, 1)")  # a zero page again
        found = region_at(capture_process(child.pid, "engine", tracker=tracker), base)
    assert page_offsets(found, base) == [5, 6, 7]


@tracking
def test_arming_again_keeps_written_pages_and_adds_new_memory(child: Child) -> None:
    base = int(child.run("b = new(50); put(b, range(50), 1); arm_self(); r = b"))
    with WriteTracker(child.pid) as tracker:
        before = capture_process(child.pid, "engine", tracker=tracker)
        child.run("put(b, [3], 2)")
        other = int(child.run("c = new(900); put(c, range(70), 1); r = c"))
        unarmed = capture_process(child.pid, "engine", tracker=tracker)
        child.run("put(b, [4], 2)")
        child.run("q = arm_self(); r = q.registered")
        armed = capture_process(child.pid, "engine", tracker=tracker)
        child.run("put(c, [9], 3)")
        last = capture_process(child.pid, "engine", tracker=tracker)
    assert region_at(unarmed, other).method == "page_hash"
    assert event_bytes(diff_process(before, unarmed), other, "new") == 900 * PAGE_BYTES
    assert page_offsets(region_at(unarmed, base), base) == [3]
    assert page_offsets(region_at(armed, base), base) == [4]
    # All of it was written since the previous arming; from the next scan on, only what is new.
    assert page_offsets(region_at(armed, other), other) == list(range(70))
    assert page_offsets(region_at(last, other), other) == [9]
    # Hashed before, tracked after: nobody watched in between, so all of it counts.
    change = next(c for c in diff_process(unarmed, armed).regions if c.start == other and c.event == "changed")
    assert (change.bytes, change.confidence) == (70 * PAGE_BYTES, "conservative")


@tracking
def test_skipped_scan_is_never_exact(child: Child) -> None:
    base = int(child.run("b = new(20); put(b, range(20), 1); arm_self(); r = b"))
    with WriteTracker(child.pid) as tracker:
        first = capture_process(child.pid, "engine", tracker=tracker)
        child.run("put(b, [1], 2)")
        capture_process(child.pid, "engine", tracker=tracker)
        third = capture_process(child.pid, "engine", tracker=tracker)
    change = next(c for c in diff_process(first, third).regions if c.start == base)
    assert (change.event, change.bytes, change.confidence) == ("changed", 20 * PAGE_BYTES, "conservative")


@tracking
def test_unmapped_memory_is_gone(child: Child) -> None:
    base = int(child.run("b = new(40); put(b, range(40), 1); arm_self(); r = b"))
    with WriteTracker(child.pid) as tracker:
        before = capture_process(child.pid, "engine", tracker=tracker)
        child.run("libc.munmap(ctypes.c_void_p(b), ctypes.c_size_t(40 * 4096))")
        after = capture_process(child.pid, "engine", tracker=tracker)
    assert event_bytes(diff_process(before, after), base, "gone") == 40 * PAGE_BYTES
    assert event_bytes(diff_process(after, before), base, "new") == 40 * PAGE_BYTES


@tracking
def test_forked_child_is_hashed_until_it_arms_itself(child: Child) -> None:
    base = int(child.run("b = new(40); put(b, range(40), 1); arm_self(); r = b"))
    child.run("a, z = os.pipe(); c, y = os.pipe()")
    child.run("step = lambda: (os.write(y, b'x'), os.read(a, 1))")
    child.run("forked = lambda: (os.read(a, 1), put(b, [6], 5), step(), arm_self(), step(), os._exit(0))")
    pid = int(child.run("r = os.fork() or forked()"))
    try:
        with WriteTracker(child.pid) as tracker, WriteTracker(pid) as fork_tracker:
            capture_process(child.pid, "engine", tracker=tracker)
            old = capture_process(pid, "engine", tracker=fork_tracker)
            child.run("os.write(z, b'x'); os.read(c, 1); put(b, [8], 5)")
            new = capture_process(pid, "engine", tracker=fork_tracker)
            parent = capture_process(child.pid, "engine", tracker=tracker)
            child.run("os.write(z, b'x'); os.read(c, 1)")
            armed = capture_process(pid, "engine", tracker=fork_tracker)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert region_at(new, base).method == "page_hash"
    assert event_bytes(diff_process(old, new), base, "changed") == PAGE_BYTES
    assert page_offsets(region_at(parent, base), base) == [8]
    assert region_at(armed, base).method == "write_tracking"


@tracking
def test_memory_remapped_in_place_counts_as_written(child: Child) -> None:
    base = int(child.run("b = new(4000); put(b, range(4000), 1); arm_self(); r = b"))
    with WriteTracker(child.pid) as tracker:
        capture_process(child.pid, "engine", tracker=tracker)
        child.run("libc.mmap(ctypes.c_void_p(b), 4000 * 4096, 3, 0x32, -1, 0)")
        child.run("libc.madvise(ctypes.c_void_p(b), ctypes.c_size_t(4000 * 4096), 15)")
        child.run("put(b, range(0, 4000, 2), 1); arm_self()")  # more than one call's worth of untouched runs
        found = region_at(capture_process(child.pid, "engine", tracker=tracker), base)
    assert found.method == "write_tracking"
    assert page_offsets(found, base) == list(range(0, 4000, 2))


def test_without_arming_everything_is_hashed(child: Child) -> None:
    base = int(child.run("b = new(400); put(b, range(300), 1); r = b"))
    before = capture_process(child.pid, "front")
    child.run("put(b, [0, 299, 399], 9); libc.madvise(ctypes.c_void_p(b + 8 * 4096), ctypes.c_size_t(4096), 4)")
    after = capture_process(child.pid, "front")
    assert {r.method for r in before.regions} == {"page_hash", "file_backed", "none"}
    assert page_offsets(region_at(before, base), base) == list(range(300))
    # Two rewritten, one new, one given back (it reads as zeros now).
    assert event_bytes(diff_process(before, after), base, "changed") == 4 * PAGE_BYTES


def test_hashing_a_page_of_zeros_equals_an_absent_one(child: Child) -> None:
    base = int(child.run("b = new(10); put(b, [1], 1); r = b"))
    before = capture_process(child.pid, "front")
    child.run("put(b, [1, 5], 0)")
    after = capture_process(child.pid, "front")
    assert page_offsets(region_at(after, base), base) == []
    assert event_bytes(diff_process(before, after), base, "changed") == PAGE_BYTES


def test_resident_but_unreadable_memory_is_blind(child: Child) -> None:
    base = int(child.run("b = new(12); put(b, range(12), 1); r = b"))
    child.run("libc.mprotect(ctypes.c_void_p(b), ctypes.c_size_t(12 * 4096), 0)")
    snapshot = capture_process(child.pid, "engine")
    region = region_at(snapshot, base)
    assert region.confidence == "blind"
    assert "could not be read" in region.reason
    assert [c.event for c in diff_process(snapshot, snapshot).regions] == ["unseen"]


def test_overwritten_code_shows_as_changed_read_only_file(child: Child) -> None:
    before = capture_process(child.pid, "front")
    code = next(r for r in before.regions if r.kind == "file" and "x" in r.perms and "python" in r.name)
    child.run(f"libc.mprotect(ctypes.c_void_p({code.start}), ctypes.c_size_t(4096), 7)")
    child.run(f"ctypes.memset({code.start} + 4000, ctypes.string_at({code.start} + 4000, 1)[0], 1)")
    child.run(f"libc.mprotect(ctypes.c_void_p({code.start}), ctypes.c_size_t(4096), 5)")
    changes = diff_process(before, capture_process(child.pid, "front")).regions
    assert [(c.event, c.bytes, c.writable) for c in changes if c.kind == "file" and "x" in c.perms] == [
        ("changed", PAGE_BYTES, False)
    ]


@pytest.mark.parametrize("reap", [True, False], ids=["reaped", "zombie"])
@pytest.mark.parametrize("stage", ["list_regions", "children"], ids=["after listing", "at the end"])
def test_process_dying_during_the_capture(
    child: Child, stage: str, reap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = getattr(process_module, stage)

    def step_then_death(pid: int, *more: object) -> tuple[object, ...]:
        done = tuple(step(pid, *more))
        child.popen.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | (0 if reap else os.WNOWAIT))
        return done

    monkeypatch.setattr(process_module, stage, step_then_death)
    with pytest.raises(ProcessGoneError):
        capture_process(child.pid, "engine")
    with pytest.raises(ProcessGoneError):
        capture_process(child.pid, "engine")
    with pytest.raises(ProcessGoneError):
        sample_memory(child.pid, requests_completed=0, tokens=0)


@tracking
def test_tracker_of_a_dead_process_is_refused_for_a_new_one(child: Child) -> None:
    with WriteTracker(child.pid) as tracker:
        tracker.start_ticks -= 1  # as if the pid had been reused
        with pytest.raises(ProcessGoneError, match="another process"):
            capture_process(child.pid, "engine", tracker=tracker)


def test_region_vanishing_between_listing_and_reading(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    base = int(child.run("b = new(16); put(b, range(16), 1); c = new(600); put(c, range(600), 1); r = b"))
    other = int(child.run("r = c"))

    def listing_then_unmap(pid: int, _tracker: None) -> tuple[tuple[Mapping, Usage], ...]:
        listed = read_smaps(pid)
        # Present when scanned, gone when read: only half of the second region vanishes.
        child.run("libc.munmap(ctypes.c_void_p(c + 300 * 4096), ctypes.c_size_t(300 * 4096))")
        return listed

    class LateUnmap(PagemapScanner):
        def resident(self, start: int, end: int, *, private_file: bool = False) -> PageNumbers:
            found = super().resident(start, end, private_file=private_file)
            if start == base:  # too small a hole for anything the interpreter maps meanwhile
                child.run("libc.munmap(ctypes.c_void_p(b), ctypes.c_size_t(16 * 4096))")
            return np.arange(start >> 12, end >> 12, dtype=np.uint64) if start == other else found

    monkeypatch.setattr(process_module, "list_regions", listing_then_unmap)
    monkeypatch.setattr(process_module, "PagemapScanner", LateUnmap)
    snapshot = capture_process(child.pid, "engine")
    assert not any(r.start == base for r in snapshot.regions)
    assert any("unmapped" in gap.reason and not gap.blind for gap in snapshot.gaps)
    half = region_at(snapshot, other)
    assert (half.confidence, len(half.pages)) == ("conservative", 300)


def test_classic_pagemap_agrees_with_the_scan(child: Child) -> None:
    base = int(child.run("b = new(2000); put(b, range(0, 2000, 3), 1); r = b"))
    with PagemapScanner(child.pid) as scanner:
        scanned = scanner.resident(base, base + 2000 * PAGE_BYTES)
        classic = scanner._resident_by_entries(base, base + 2000 * PAGE_BYTES, private_file=False)
    assert classic.tolist() == scanned.tolist() == [base // PAGE_BYTES + n for n in range(0, 2000, 3)]


def test_kernel_threads_and_missing_processes_are_typed_errors() -> None:
    with pytest.raises(CaptureError):
        capture_process(2, "engine")
    with pytest.raises(ProcessGoneError):
        capture_process(2**22 + 1, "engine")


def test_arming_reports_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise PermissionError(1, "userfaultfd: Operation not permitted")

    monkeypatch.setattr("snapshots.capture.kernel.open_userfaultfd", refuse)
    monkeypatch.setattr(uffd, "_armed", uffd._Armed())
    report = uffd.arm_self()
    assert not report.armed
    assert "not permitted" in report.reason


def _serve(child: Child, statement: str, requests: int) -> list[MemorySample]:
    samples = []
    for done in range(requests):
        samples += [sample_memory(child.pid, requests_completed=done, tokens=40 * done) for _ in range(2)]
        child.run(statement)
    return samples


@pytest.mark.parametrize(
    ("statement", "planted"),
    [
        ("d = os.urandom(16384); kept.append(bytearray(d))", 16384),
        ("d = os.urandom(16384); last = bytearray(d)", 0),
    ],
    ids=["keeps 16 KiB", "sound twin"],
)
def test_growth_of_a_real_process(child: Child, statement: str, planted: int) -> None:
    child.run("kept = []")
    _serve(child, statement, 3)
    assert child.run("r = release_free_heap()") == "True"  # else holes left by imports hide the first dozen
    growth = estimate_growth(_serve(child, statement, 20))
    assert isinstance(growth, GrowthEstimate)
    assert growth.bytes_per_request == pytest.approx(planted, rel=0.1, abs=512)
    assert growth.low <= planted + 512


def test_arming_needs_no_numpy() -> None:
    """Arming runs inside the serving process: it must not pull in numpy."""
    code = "import sys; import snapshots.capture.uffd; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
