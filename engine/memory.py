"""How much memory there is and how much of it is in use. A thin shell around the kernel and the driver.

On a CPU both come from the tighter of the host and the control group (cgroup v2):

- host: ``MemTotal``, and what is not in ``MemAvailable`` (proc_meminfo(5));
- control group: ``memory.max``, and ``memory.current`` without ``inactive_file``, the page cache that goes
  first under pressure (the "working set" of kubelet; cgroup-v2.rst).

The kernel counts clean mapped files as available, but weights that serve are read at every step: the file
pages that this process has resident are in use as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from engine.governor import Memory

# The operator's limit for this engine alone, in bytes; what it has resident itself counts as used then.
TOTAL_VARIABLE = "PATCHCTL_ENGINE_MEMORY_BYTES"
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_KIB = 1024
# The longest of the files read, memory.stat, has about 60 short lines.
_FILE_BYTES_MAX = 8192
# Fields of /proc/self/statm: resident pages, and those of them that belong to files or shared memory.
_RESIDENT, _SHARED = 1, 2


class MemoryUnreadableError(OSError):
    """The kernel does not tell what we need; the message names the file."""


ReadMemory = Callable[[], Memory]


def memory_reader(device: torch.device) -> ReadMemory:
    """A function that reads the memory of ``device``; a few file reads or one driver call each time.

    Raises:
        MemoryUnreadableError: a file is missing or not understood, or the variable is no positive number.
    """
    total_bytes = _override()
    if device.type == "cuda":
        return lambda: _cuda(device, total_bytes)
    own = _OpenFile(Path("/proc/self/statm"))
    if total_bytes is not None:
        return lambda: Memory(used_bytes=_pages(own, _RESIDENT), total_bytes=total_bytes)
    host = _OpenFile(Path("/proc/meminfo"))
    groups = _limited_groups(_CGROUP_ROOT, Path("/proc/self/cgroup"))

    def read() -> Memory:
        mapped = _pages(own, _SHARED)
        readings = [_host(host, mapped), *(group.read() for group in groups)]
        return min(readings, key=lambda memory: memory.limit_bytes - memory.used_bytes)

    read()
    return read


def _override() -> int | None:
    text = os.environ.get(TOTAL_VARIABLE, "")
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise MemoryUnreadableError(f"{TOTAL_VARIABLE} must be a positive number of bytes, not {text!r}")
    return int(text)


def _cuda(device: torch.device, limit_bytes: int | None) -> Memory:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    used_bytes = total_bytes - free_bytes
    return Memory(used_bytes, total_bytes if limit_bytes is None else min(limit_bytes, total_bytes))


class _OpenFile:
    """A kernel file kept open: the kernel makes its content anew for every read from the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise MemoryUnreadableError(f"cannot read {path}: {error.strerror}") from error

    def text(self) -> str:
        return os.pread(self._file.fileno(), _FILE_BYTES_MAX, 0).decode("ascii")

    def field(self, name: str) -> int:
        """The number after ``name`` at the beginning of a line."""
        _, found, rest = ("\n" + self.text()).partition("\n" + name)
        if not found:
            raise MemoryUnreadableError(f"{self._path} has no {name.strip()}")
        return int(rest.split(maxsplit=1)[0])


def _pages(statm: _OpenFile, field: int) -> int:
    return int(statm.text().split()[field]) * os.sysconf("SC_PAGE_SIZE")


def _host(meminfo: _OpenFile, mapped_bytes: int) -> Memory:
    total = meminfo.field("MemTotal:") * _KIB
    available = meminfo.field("MemAvailable:") * _KIB
    return Memory(used_bytes=min(total, total - available + mapped_bytes), total_bytes=total)


class _Group:
    """One control group that has a limit."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._current = _OpenFile(folder / "memory.current")
        self._stat = _OpenFile(folder / "memory.stat")

    def read(self) -> Memory:
        used = int(self._current.text()) - self._stat.field("inactive_file ")
        return Memory(used_bytes=max(0, used), total_bytes=self._limit_bytes)


def _limited_groups(root: Path, membership: Path) -> list[_Group]:
    """The groups with a limit, from ours up to the root: the tightest one rules. Version 1 is not looked at."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    groups = []
    folder = root / own
    while True:
        try:
            limit = (folder / "memory.max").read_text().strip()
        except OSError:
            limit = "max"  # the root has none, and neither has a host without this version
        if limit != "max":
            groups.append(_Group(folder, int(limit)))
        if folder == root:
            return groups
        folder = folder.parent
