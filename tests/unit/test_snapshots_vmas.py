"""Reading /proc texts: kinds, odd names, unknown fields; and what probing does where features are missing."""

from __future__ import annotations

import mmap
import os

import pytest

from snapshots.capture import probe as probe_module
from snapshots.capture import vmas
from snapshots.capture.errors import AccessDeniedError, ProcessGoneError
from snapshots.capture.probe import probe
from snapshots.capture.process import _without_reading
from snapshots.capture.uffd import trackable
from snapshots.capture.vmas import kind_of, parse_maps, parse_smaps, read_maps, read_smaps, read_usage, reading

_SMAPS = """\
7f0000000000-7f0000200000 rw-p 00000000 00:00 0 
Size:               2048 kB
Rss:                1024 kB
Pss:                 512 kB
Anonymous:          1000 kB
Swap:                 24 kB
NewField:              7 kB
THPeligible:           1
VmFlags: rd wr mr mw me ac uw 
7f0000200000-7f0000300000 rw-s 00000000 00:05 99                         /dev/nvidia-uvm (deleted)
Rss:                   0 kB
VmFlags: rd wr sh io pf 
7f0000400000-7f0000600000 rw-p 00000000 00:0e 7                          /mnt/huge/a b c
Rss:                   0 kB
VmFlags: rd wr mr mw me ht 
"""  # noqa: W291 - the kernel pads its lines


def test_smaps() -> None:
    anon, device, huge = parse_smaps(_SMAPS)
    assert (anon[0].start, anon[0].end, anon[0].kind) == (0x7F0000000000, 0x7F0000200000, "anon")
    assert (anon[1].rss_bytes, anon[1].pss_bytes, anon[1].anonymous_bytes) == (1 << 20, 1 << 19, 1000 << 10)
    assert anon[1].swap_bytes == 24 << 10
    assert "uw" in anon[1].flags
    assert (device[0].kind, device[0].name) == ("device", "/dev/nvidia-uvm (deleted)")
    assert (huge[0].kind, huge[0].name) == ("hugetlb", "/mnt/huge/a b c")


@pytest.mark.parametrize(
    ("perms", "name", "kind"),
    [
        ("rw-p", "", "anon"),
        ("rw-p", "[anon:glibc: malloc arena]", "anon"),
        ("rw-p", "[heap]", "heap"),
        ("rw-p", "[stack]", "stack"),
        ("r-xp", "[vdso]", "special"),
        ("r--p", "[vvar_vclock]", "special"),
        ("--xp", "[vsyscall]", "special"),
        ("r-xp", "/usr/lib/libc.so.6", "file"),
        ("rw-s", "/dev/shm/ring", "shared"),
        ("rw-s", "/dev/zero (deleted)", "shared"),
        ("rw-s", "/dev/nvidia0", "device"),
        ("rw-p", "/dev/nvidiactl", "device"),
        ("rw-p", "/anon_hugepage (deleted)", "hugetlb"),
    ],
)
def test_kinds(perms: str, name: str, kind: str) -> None:
    assert kind_of(perms, name) == kind


def test_what_is_armed() -> None:
    lines = {
        "1000-2000 rw-p 00000000 00:00 0": True,
        "2000-3000 ---p 00000000 00:00 0": False,
        "3000-4000 rw-p 00000000 00:00 0 [heap]": True,
        "4000-5000 rw-p 00000000 fe:00 9 /lib/a.so": True,
        "5000-6000 r-xp 00000000 fe:00 9 /lib/a.so": False,
        "6000-7000 r--p 00000000 00:00 0": False,
        "7000-8000 rw-s 00000000 00:00 0": False,
        "8000-9000 rw-p 00000000 00:00 0 /dev/nvidia0": False,
        "9000-a000 rw-p 00000000 00:00 0 /anon_hugepage": False,
    }
    assert [trackable(m) for m in parse_maps("\n".join(lines))] == list(lines.values())


def test_device_memory_is_blind_and_mapped_files_need_no_reading() -> None:
    _, device, _ = parse_smaps(_SMAPS)
    content = _without_reading(*device)
    assert content is not None
    assert content.confidence == "blind"
    clean = _without_reading(parse_maps("1000-2000 r-xp 0 fe:00 9 /lib/a.so")[0], device[1])
    assert clean is not None
    assert (clean.method, clean.confidence) == ("file_backed", "exact")
    assert _without_reading(parse_maps("1000-2000 r--s 0 fe:00 9 /cache")[0], device[1]) is None  # it is read
    weights = _without_reading(parse_maps("1000-8000000 r--s 0 fe:00 9 /weights")[0], device[1])
    assert weights is not None
    assert (weights.method, weights.confidence) == ("file_backed", "conservative")
    assert _without_reading(parse_maps("1000-8000000 r--s 0 00:01 9 /memfd:state")[0], device[1]) is None


def test_listings_agree_about_this_process() -> None:
    assert {m.start for m in read_maps(os.getpid())} & {m.start for m, _ in read_smaps(os.getpid())}
    assert read_usage(os.getpid()).anonymous_bytes > 0


@pytest.mark.parametrize(
    ("release", "exact"), [("6.18.44-fc", True), ("6.17.0", True), ("6.9.1", False), ("7.0-rc1", True), ("odd", False)]
)
def test_status_is_trusted_from_6_17_on(release: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", release, "#1", "x86_64")))
    assert vmas.status_is_exact.__wrapped__() is exact


@pytest.mark.parametrize("exact", [True, False])
def test_anonymous_bytes_by_either_source(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    block = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * (8 << 20))
    monkeypatch.setattr(vmas, "status_is_exact", lambda: exact)
    held = vmas.read_anonymous_bytes(os.getpid())
    block.close()
    assert held - vmas.read_anonymous_bytes(os.getpid()) == pytest.approx(8 << 20, abs=1 << 20)


def test_errors_are_typed() -> None:
    with pytest.raises(AccessDeniedError), reading(1):
        raise PermissionError(1, "no")
    with pytest.raises(ProcessGoneError), reading(1):
        raise ProcessLookupError(3, "no")


def test_probe_names_every_feature_with_a_reason() -> None:
    found = probe()
    assert [f.name for f in found.features] == [name for name, _ in probe_module._CHECKS]
    assert all(f.detail for f in found.features)
    assert found.feature("smaps").available
    with pytest.raises(KeyError):
        found.feature("soft_dirty")


@pytest.mark.parametrize(
    ("error", "detail"),
    [(FileNotFoundError(2, "No such file"), "No such file"), (RuntimeError(), "RuntimeError")],
)
def test_probe_degrades(error: Exception, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> str:
        raise error

    checks = tuple((name, missing) for name, _ in probe_module._CHECKS)
    monkeypatch.setattr(probe_module, "_CHECKS", checks)
    found = probe()
    assert not any(f.available for f in found.features)
    assert all(detail in f.detail for f in found.features)
    assert not found.write_tracking.available
    assert "pagemap_scan" in found.write_tracking.detail


def test_probe_of_a_process_that_is_gone_says_so() -> None:
    found = probe(2**22 + 1)
    assert "it ended" in found.feature("smaps").detail
    assert found.as_dict()["smaps"]["available"] is False
