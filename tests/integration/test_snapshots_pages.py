"""Planted sets of written pages are found exactly, whatever the process does with its memory meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from snapshots.capture import process as process_module
from snapshots.capture.errors import ProcessGoneError
from snapshots.capture.listing import list_regions
from snapshots.capture.pages import WriteTracker
from snapshots.capture.probe import probe
from snapshots.capture.process import capture_process
from snapshots.capture.reader import PageReader
from snapshots.capture.shared import open_backing
from snapshots.capture.vmas import Mapping, read_smaps
from snapshots.diff import diff_process
from snapshots.model import PAGE_BYTES, ProcessSnapshot, Region

_TRACKING = probe().write_tracking
tracking = pytest.mark.skipif(not _TRACKING.available, reason=_TRACKING.detail)

PAGES = 6144  # 24 MiB: 12 huge pages; 0.1 % are 6 pages, 10 % are more runs than 512
SHARES = (0.001, 0.01, 0.1)

# Runs one statement per line and answers with `r`.
_TARGET = """
import ctypes, mmap, os, struct, sys
from snapshots.capture.uffd import arm_self
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def new(pages, advice=15):  # MADV_NOHUGEPAGE; in an address range of its own, aligned to 2 MiB
    base = -(-(libc.mmap(None, pages * 4096 + (4 << 20), 0, 0x22, -1, 0) + 4096) // (2 << 20)) * (2 << 20)
    assert libc.mprotect(base, pages * 4096, 3) == 0
    assert libc.madvise(base, pages * 4096, advice) == 0
    return base
def put(base, pages, value):
    for page in pages:
        ctypes.memset(base + page * 4096 + 7, value, 1)
def fill(base, pages):
    put(base, range(pages), 1)
    return base
env = dict(globals())
for line in sys.stdin:
    env['r'] = ''
    exec(line, env)
    print(env['r'], flush=True)
"""


@dataclass
class Target:
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
        assert answer, "the target died"
        return answer.strip()


@pytest.fixture
def target() -> Iterator[Target]:
    command = [sys.executable, "-P", "-c", _TARGET]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started = Target(popen)
    started.run("")  # imports are done
    yield started
    popen.kill()
    popen.communicate()


def within(snapshot: ProcessSnapshot, base: int, pages: int) -> list[Region]:
    return [r for r in snapshot.regions if r.start < base + pages * PAGE_BYTES and r.end > base]


def pages_of(regions: list[Region], base: int) -> dict[int, int]:
    """Page offset from ``base`` → digest."""
    return {
        int(number) - base // PAGE_BYTES: int(digest)
        for region in regions
        for number, digest in zip(
            np.frombuffer(region.pages.numbers, "<u8"), np.frombuffer(region.pages.digests, "<u8"), strict=True
        )
    }


def planted_pages(share: float) -> list[int]:
    rng = np.random.default_rng(round(share * 1000))
    return sorted(rng.choice(PAGES, round(PAGES * share), replace=False).tolist())


def assert_found(before: ProcessSnapshot, after: ProcessSnapshot, base: int, planted: list[int], method: str) -> None:
    """Exactly the planted pages: by tracking those reported, by hashing those that differ."""
    old, new = within(before, base, PAGES), within(after, base, PAGES)
    assert {(r.method, r.confidence) for r in new} == {(method, "exact")}
    found = pages_of(new, base)
    if method == "page_hash":
        earlier = pages_of(old, base)
        found = {page: digest for page, digest in found.items() if earlier.get(page) != digest}
    assert sorted(found) == planted
    changed = [
        c
        for c in diff_process(before, after).regions
        if c.event == "changed" and c.start < base + PAGES * PAGE_BYTES and c.end > base
    ]
    assert sum(c.bytes for c in changed) == len(planted) * PAGE_BYTES
    assert {c.confidence for c in changed} == {"exact"}


@tracking
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("advice", [15, 14], ids=["small pages", "huge pages"])
def test_planted_pages(target: Target, share: float, advice: int) -> None:
    base = int(target.run(f"b = fill(new({PAGES}, {advice}), {PAGES}); r = b"))
    if advice == 14 and not _huge_bytes(target.pid, base):
        pytest.skip("this kernel gave no transparent huge page")
    target.run("arm_self()")
    planted = planted_pages(share)
    with WriteTracker(target.pid) as tracker:
        before = capture_process(target.pid, "engine", tracker=tracker)
        target.run(f"put(b, {planted}, 2)")
        after = capture_process(target.pid, "engine", tracker=tracker)
        again = capture_process(target.pid, "engine", tracker=tracker)
    assert_found(before, after, base, planted, "write_tracking")
    assert not pages_of(within(again, base, PAGES), base)


def _huge_bytes(pid: int, base: int) -> int:
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        first = line.split("-", 1)[0]
        if "-" in line and ":" not in first:
            inside = int(first, 16) == base
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0


@tracking
@pytest.mark.parametrize("share", SHARES)
def test_planted_pages_in_memory_newer_than_the_arming(target: Target, share: float) -> None:
    target.run("arm_self()")
    base = int(target.run(f"b = fill(new({PAGES}), {PAGES}); r = b"))
    planted = planted_pages(share)
    with WriteTracker(target.pid) as tracker:
        before = capture_process(target.pid, "engine", tracker=tracker)
        target.run(f"put(b, {planted}, 2)")
        after = capture_process(target.pid, "engine", tracker=tracker)
        assert_found(before, after, base, planted, "page_hash")
        target.run("arm_self()")
        armed = capture_process(target.pid, "engine", tracker=tracker)
        target.run(f"put(b, {planted}, 3)")
        assert_found(armed, capture_process(target.pid, "engine", tracker=tracker), base, planted, "write_tracking")


@tracking
@pytest.mark.parametrize("share", SHARES)
def test_planted_pages_in_moved_memory(target: Target, share: float) -> None:
    target.run(f"b = fill(new({PAGES}), {PAGES}); arm_self()")
    planted = planted_pages(share)
    with WriteTracker(target.pid) as tracker:
        capture_process(target.pid, "engine", tracker=tracker)
        size = PAGES * PAGE_BYTES
        moved = int(target.run(f"b = libc.mremap(b, {size}, {size}, 3, new({PAGES})); r = b"))
        before = capture_process(target.pid, "engine", tracker=tracker)
        target.run(f"put(b, {planted}, 2)")
        after = capture_process(target.pid, "engine", tracker=tracker)
    method = within(after, moved, PAGES)[0].method  # kernels differ in whether a moved mapping stays registered
    assert_found(before, after, moved, planted, method)


@tracking
@pytest.mark.parametrize("share", SHARES)
def test_planted_pages_around_unmapped_memory(target: Target, share: float) -> None:
    base = int(target.run(f"b = fill(new({PAGES}), {PAGES}); arm_self(); r = b"))
    planted = planted_pages(share)
    hole = next(n for n in range(1000, PAGES) if not {n, n + 1, n + 2} & set(planted))
    with WriteTracker(target.pid) as tracker:
        before = capture_process(target.pid, "engine", tracker=tracker)
        target.run(f"put(b, {planted}, 2); libc.munmap(b + {hole} * 4096, 3 * 4096)")
        after = capture_process(target.pid, "engine", tracker=tracker)
    assert len(within(after, base, PAGES)) == 2
    assert_found(before, after, base, planted, "write_tracking")
    shrunk = [c for c in diff_process(before, after).regions if c.event == "shrunk" and c.start == base]
    assert [c.bytes for c in shrunk] == [3 * PAGE_BYTES]


@tracking
@pytest.mark.parametrize("share", SHARES)
def test_planted_pages_on_both_sides_of_a_fork(target: Target, share: float) -> None:
    base = int(target.run(f"b = fill(new({PAGES}), {PAGES}); arm_self(); r = b"))
    planted = planted_pages(share)
    theirs = [page for page in range(PAGES) if page not in set(planted)][: len(planted)]
    target.run("a, z = os.pipe(); c, y = os.pipe()")
    target.run(f"forked = lambda: (os.read(a, 1), put(b, {theirs}, 5), os.write(y, b'x'), os.read(a, 1), os._exit(0))")
    child = int(target.run("r = os.fork() or forked()"))
    try:
        with WriteTracker(target.pid) as tracker, WriteTracker(child) as child_tracker:
            before = capture_process(target.pid, "engine", tracker=tracker)
            child_before = capture_process(child, "engine", tracker=child_tracker)
            target.run(f"put(b, {planted}, 2); os.write(z, b'x'); os.read(c, 1)")
            after = capture_process(target.pid, "engine", tracker=tracker)
            child_after = capture_process(child, "engine", tracker=child_tracker)
    finally:
        os.kill(child, signal.SIGKILL)
    assert_found(before, after, base, planted, "write_tracking")
    assert_found(child_before, child_after, base, theirs, "page_hash")
    (remark,) = [gap for gap in after.gaps if gap.subject == f"child:{child}"]
    assert "not tracked" in remark.reason
    assert not remark.blind


@pytest.mark.parametrize("share", SHARES)
def test_planted_pages_in_hugetlb_memory(target: Target, share: float) -> None:
    base = int(target.run(f"b = libc.mmap(None, {PAGES * PAGE_BYTES}, 3, 0x40022, -1, 0); r = b or -1"))
    if base in (-1, 2**64 - 1):
        pytest.skip("no huge pages are reserved here (vm.nr_hugepages)")
    planted = planted_pages(share)
    target.run(f"fill(b, {PAGES}); arm_self()")
    before = capture_process(target.pid, "engine")
    target.run(f"put(b, {planted}, 2)")
    assert_found(before, capture_process(target.pid, "engine"), base, planted, "page_hash")


@tracking
def test_a_leak_is_seen_as_new_memory(target: Target) -> None:
    target.run("kept = []; arm_self()")
    with WriteTracker(target.pid) as tracker:
        before = capture_process(target.pid, "engine", tracker=tracker)
        target.run(f"kept.append(bytearray(b'x' * {8 << 20}))")
        after = capture_process(target.pid, "engine", tracker=tracker)
    appeared = sum(c.bytes for c in diff_process(before, after).regions if c.event in ("new", "grown"))
    assert 8 << 20 <= appeared < 9 << 20
    assert 8 << 20 <= after.anonymous_bytes - before.anonymous_bytes < 9 << 20


# 64 pages from the third page of a file of 67.
_MAP_SHARED_MEMORY = (
    "f = os.memfd_create('state'); os.ftruncate(f, 67 * 4096); "
    "b = libc.mmap(None, 64 * 4096, {prot}, 1, f, 8192); r = b"
)


@tracking
@pytest.mark.parametrize("prot", [1, 3], ids=["read-only", "writable"])
def test_pages_written_by_another_process_through_shared_memory(target: Target, prot: int) -> None:
    base = int(target.run(_MAP_SHARED_MEMORY.format(prot=prot)))
    target.run("arm_self()")
    other = os.open(f"/proc/{target.pid}/fd/{target.run('r = f')}", os.O_RDWR)
    try:
        with WriteTracker(target.pid) as tracker:
            before = capture_process(target.pid, "engine", tracker=tracker)
            for page in (5, 6, 63):
                os.pwrite(other, b"\x07", (2 + page) * PAGE_BYTES)
            os.pwrite(other, b"\x07", 0)  # outside the mapping
            os.pwrite(other, b"\x07", 66 * PAGE_BYTES)
            after = capture_process(target.pid, "engine", tracker=tracker)
    finally:
        os.close(other)
    (region,) = within(after, base, 64)
    assert (region.kind, region.method, region.confidence) == ("shared", "page_hash", "exact")
    assert sorted(pages_of([region], base)) == [5, 6, 63]
    (change,) = [c for c in diff_process(before, after).regions if c.start == base]
    assert (change.event, change.bytes) == ("changed", 3 * PAGE_BYTES)


def test_shared_memory_that_cannot_be_opened_is_blind(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    base = int(target.run(_MAP_SHARED_MEMORY.format(prot=3)))
    target.run("put(b, [1], 1)")

    def no_way(pid: int, mapping: Mapping) -> None:
        return None

    monkeypatch.setattr(process_module, "open_backing", no_way)
    before = capture_process(target.pid, "engine")
    (region,) = within(before, base, 64)
    assert (region.method, region.confidence) == ("page_hash", "blind")
    assert "only other processes" in region.reason
    assert [c.event for c in diff_process(before, before).regions if c.start == base] == ["unseen"]
    target.run("put(b, range(64), 1)")  # all of it is in this process's page tables: nothing is left unseen
    (region,) = within(capture_process(target.pid, "engine"), base, 64)
    assert region.confidence == "exact"


def test_another_file_at_the_same_path_is_not_taken(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"a" * PAGE_BYTES)
    target.run(f"f = os.open({str(path)!r}, os.O_RDONLY); b = libc.mmap(None, 4096, 1, 1, f, 0); os.close(f)")
    (mapping,) = [m for m, _ in read_smaps(target.pid) if m.name == str(path)]
    by_path = replace(mapping, start=1, end=2)  # as where map_files can't be opened
    fd = open_backing(target.pid, by_path)
    assert fd is not None
    os.close(fd)
    (tmp_path / "other").write_bytes(b"b" * PAGE_BYTES)
    (tmp_path / "other").rename(path)
    assert open_backing(target.pid, by_path) is None


def test_large_shared_file_mapped_read_only_is_not_read(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshots.capture.shared._FILE_BYTES_MAX", 2 * PAGE_BYTES)
    target.run("import tempfile; f = tempfile.TemporaryFile(); f.write(b'x' * 12288); f.flush()")
    base = int(target.run("b = libc.mmap(None, 12288, 1, 1, f.fileno(), 0); r = b"))
    (region,) = within(capture_process(target.pid, "engine"), base, 3)
    assert (region.method, region.confidence, len(region.pages)) == ("file_backed", "conservative", 0)


# A ring of 4 entries and one READ_FIXED into a registered buffer: the kernel writes the pages that it pinned.
_RING = """
p = ctypes.create_string_buffer(120); u = libc.syscall(425, 4, p); r = u
"""
_RING_MAPS = (
    "v = struct.unpack('=30I', p.raw); "
    "q = libc.mmap(None, max(v[16] + 4 * v[0], v[25] + 16 * v[1]), 3, 0x8001, u, 0); "
    "e = libc.mmap(None, 64 * v[0], 3, 0x8001, u, 0x10000000)"
)
_READ_FIXED = (
    "ctypes.memmove(e, struct.pack('=BBHiQQIIQH', 4, 0, 0, f, 0, b + 3 * 4096, 4096, 0, 0, 0) + bytes(22), 64); "
    "t = ctypes.c_uint32.from_address(q + v[11]); ctypes.c_uint32.from_address(q + v[16]).value = 0; t.value += 1; "
    "n = libc.syscall(426, u, 1, 1, 1, None, 0); "
    "r = (n, ctypes.c_int32.from_address(q + v[25] + 8).value)"
)


@tracking
def test_device_writes_into_registered_buffers(target: Target) -> None:
    target.run(_RING.strip())
    if int(target.run("r = u")) < 0:
        pytest.skip("io_uring is not allowed here")
    assert not capture_process(target.pid, "engine").gaps
    base = int(target.run("b = fill(new(64), 64); r = b"))
    target.run("f = os.memfd_create('input'); os.write(f, b'y' * 4096)")
    target.run(_RING_MAPS)
    target.run("w = (ctypes.c_size_t * 2)(b, 64 * 4096)")
    assert target.run("r = libc.syscall(427, u, 0, w, 1)") == "0"
    target.run("arm_self()")
    with WriteTracker(target.pid) as tracker:
        before = capture_process(target.pid, "engine", tracker=tracker)
        tracker.written(base, base + 64 * PAGE_BYTES)
        assert target.run(_READ_FIXED) == "(1, 4096)"
        # The blind spot itself: the kernel wrote, and no page is marked.
        unmarked = tracker.written(base, base + 64 * PAGE_BYTES)
        assert unmarked is not None
        assert unmarked.tolist() == []
        after = capture_process(target.pid, "engine", tracker=tracker)
    (gap,) = [gap for gap in after.gaps if gap.subject.startswith("io_uring:")]
    assert gap.blind
    (region,) = within(after, base, 64)
    assert region.method == "page_hash"
    (change,) = [c for c in diff_process(before, after).regions if c.start == base and c.event == "changed"]
    assert change.bytes == PAGE_BYTES


def test_hashing_in_threads_changes_nothing(target: Target) -> None:
    base = int(target.run(f"b = new({PAGES}); put(b, range({PAGES}), 1); put(b, range(0, {PAGES}, 3), 9); r = b"))
    target.run("libc.mprotect(b + 4096 * 2000, 4096 * 100, 0)")
    numbers = np.arange(base // PAGE_BYTES, base // PAGE_BYTES + PAGES, dtype=np.uint64)
    numbers = numbers[np.arange(PAGES) % 7 != 0]
    alone = PageReader(target.pid, threads_max=1).digest(numbers)
    reader = PageReader(target.pid, threads_max=4)
    reader._lanes += [type(reader._lanes[0])() for _ in range(4 - len(reader._lanes))]  # on one core too
    together = reader.digest(numbers)
    hidden = [base // PAGE_BYTES + 2000 <= int(n) < base // PAGE_BYTES + 2100 for n in numbers]
    assert alone.readable.tolist() == [not h for h in hidden]
    assert together.readable.tolist() == alone.readable.tolist()
    assert together.digests.tolist() == alone.digests.tolist()


def test_process_dying_between_scan_and_read(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.run(f"fill(new({PAGES}), {PAGES})")
    digest: Callable[..., object] = PageReader.digest

    def die_first(reader: PageReader, numbers: object) -> object:
        target.popen.kill()
        target.popen.wait()
        return digest(reader, numbers)

    monkeypatch.setattr(PageReader, "digest", die_first)
    with pytest.raises(ProcessGoneError, match="ended"):
        capture_process(target.pid, "engine")


def test_pid_that_belongs_to_another_process_afterwards(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([100, 200])
    monkeypatch.setattr(process_module, "start_ticks", lambda _pid: next(ticks))
    with pytest.raises(ProcessGoneError, match="another process"):
        capture_process(target.pid, "engine")


@tracking
def test_quick_listing_agrees_with_smaps(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.run("b = new(300); put(b, range(0, 300, 3), 1); r = ctypes.string_at(b, 300 * 4096)[0]")  # zero pages too
    target.run("m = mmap.mmap(-1, 8 * 4096); m[:4096] = b'x' * 4096; import json, decimal; arm_self()")
    with WriteTracker(target.pid) as tracker:
        slow = list_regions(target.pid, tracker)

        def never(pid: int) -> None:
            raise AssertionError("smaps was read again")

        with monkeypatch.context() as patch:
            patch.setattr("snapshots.capture.listing.read_smaps", never)
            quick = list_regions(target.pid, tracker)
            target.run("c = fill(new(50), 50)")  # plain memory needs no second look
            assert len(list_regions(target.pid, tracker)) > len(quick)
            target.run("f = os.memfd_create('x'); os.ftruncate(f, 4096); d = libc.mmap(None, 4096, 3, 1, f, 0)")
            with pytest.raises(AssertionError, match="again"):  # a file does
                list_regions(target.pid, tracker)
    assert [mapping for mapping, _ in quick] == [mapping for mapping, _ in slow]
    figures = [(usage.rss_bytes, usage.anonymous_bytes, usage.swap_bytes) for _, usage in slow]
    for (mapping, usage), expected in zip(quick, figures, strict=True):
        if mapping.kind != "special":  # not looked at
            assert (mapping.name, usage.rss_bytes, usage.anonymous_bytes, usage.swap_bytes) == (mapping.name, *expected)


def test_listing_names_offset_and_inode(target: Target) -> None:
    target.run("f = os.memfd_create('x'); os.ftruncate(f, 4 * 4096); b = libc.mmap(None, 8192, 1, 1, f, 4096)")
    inode = int(target.run("r = os.fstat(f).st_ino"))
    (mapping,) = [m for m, _ in read_smaps(target.pid) if m.name.startswith("/memfd:x")]
    assert (mapping.offset, mapping.inode) == (4096, inode)
