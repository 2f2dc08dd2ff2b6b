"""Memory in use: the kernel's files as they are, and chosen ones for control groups."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest
import torch

from engine import memory
from engine.memory import TOTAL_VARIABLE, MemoryUnreadableError, memory_reader

CPU = torch.device("cpu")
MIB = 1 << 20


def group(folder: Path, *, limit: str, current: int, inactive_file: int) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ntotal_inactive_file 5\ninactive_file {inactive_file}\n")


@pytest.fixture
def no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hierarchy of control groups without any limit; the host's own memory decides."""
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    return tmp_path


def meminfo(field: str) -> int:
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def test_the_host_is_read_as_the_kernel_tells_it(no_group: Path) -> None:
    reading = memory_reader(CPU)()
    assert reading.total_bytes == meminfo("MemTotal")
    # Within what others do meanwhile: this process's mapped files count as used.
    assert abs(reading.used_bytes - (meminfo("MemTotal") - meminfo("MemAvailable"))) < reading.total_bytes // 4
    assert reading.limit_bytes == reading.total_bytes * 85 // 100


def test_an_operators_limit_counts_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_VARIABLE, str(3000 * MIB))
    read = memory_reader(CPU)
    before = read()
    with mmap.mmap(-1, 64 * MIB) as taken:
        for page in range(0, 64 * MIB, mmap.PAGESIZE):
            taken[page] = 1
        grown = read().used_bytes - before.used_bytes
    assert before.total_bytes == 3000 * MIB
    assert 60 * MIB < grown < 80 * MIB


@pytest.mark.parametrize("value", ["0", "-5", "12 GiB", "1e9"])
def test_a_limit_that_is_no_number_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_VARIABLE, value)
    with pytest.raises(MemoryUnreadableError, match="positive number of bytes"):
        memory_reader(CPU)


def test_the_tightest_group_on_the_way_up_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cgroup"
    group(root / "outer", limit=str(100 * MIB), current=90 * MIB, inactive_file=30 * MIB)
    group(root / "outer" / "inner", limit=str(95 * MIB), current=80 * MIB, inactive_file=70 * MIB)
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/elsewhere\n0::/outer/inner\n")
    readings = [one.read() for one in memory._limited_groups(root, membership)]
    assert [(one.used_bytes // MIB, one.total_bytes // MIB) for one in readings] == [(10, 95), (60, 100)]
    monkeypatch.setattr(memory, "_CGROUP_ROOT", root)
    real, original = Path("/proc/self/cgroup"), memory._limited_groups
    assert real.exists()
    monkeypatch.setattr(memory, "_limited_groups", lambda folder, _own: original(folder, membership))
    # The outer one leaves 40 MiB, the inner one 85: the host leaves gigabytes.
    assert memory_reader(CPU)().total_bytes == 100 * MIB


def test_groups_without_a_limit_are_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "mine", limit="max", current=1, inactive_file=0)
    membership = tmp_path / "membership"
    membership.write_text("0::/mine\n")
    assert memory._limited_groups(root, membership) == []
    membership.write_text("4:memory:/version-one-only\n")
    assert memory._limited_groups(root, membership) == []
    assert memory._limited_groups(root, tmp_path / "missing") == []


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "mine", limit="1000000", current=1, inactive_file=0)
    (root / "mine" / "memory.stat").write_text("anon 1\n")
    (tmp_path / "membership").write_text("0::/mine\n")
    (mine,) = memory._limited_groups(root, tmp_path / "membership")
    with pytest.raises(MemoryUnreadableError, match=r"memory\.stat has no inactive_file"):
        mine.read()


def test_a_look_is_cheap_enough_for_the_serve_loop(no_group: Path) -> None:
    read = memory_reader(CPU)
    durations_us = []
    for _ in range(200):
        start_s = time.perf_counter()
        read()
        durations_us.append((time.perf_counter() - start_s) * 1e6)
    # The fastest of many: other processes cannot make it faster. Ten times what it takes, so that only a
    # look of another kind fails, such as one that starts reading every process.
    assert min(durations_us) < 300
