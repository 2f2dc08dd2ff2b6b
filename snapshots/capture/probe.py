"""What this kernel and these rights offer to a capture; nothing here raises for a missing feature."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from snapshots.capture import kernel
from snapshots.capture.errors import CaptureError
from snapshots.capture.vmas import read_maps, read_smaps, read_usage


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature. ``detail`` says what was found, or why it is absent."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Probe:
    """All features, in the order of :data:`_CHECKS`."""

    features: tuple[Feature, ...]

    def feature(self, name: str) -> Feature:
        """One feature by name.

        Raises:
            KeyError: no such feature is probed.
        """
        for feature in self.features:
            if feature.name == name:
                return feature
        raise KeyError(name)

    @property
    def write_tracking(self) -> Feature:
        """Whether written pages can be told without hashing all memory, and if not why."""
        needed = [self.feature(name) for name in ("userfaultfd_wp_async", "pagemap_scan", "process_vm_readv")]
        missing = [feature for feature in needed if not feature.available]
        detail = "; ".join(f"{feature.name}: {feature.detail}" for feature in missing)
        return Feature("write_tracking", available=not missing, detail=detail or "every written page is known")

    def as_dict(self) -> dict[str, dict[str, str | bool]]:
        """The features by name, for JSON output."""
        return {f.name: {"available": f.available, "detail": f.detail} for f in self.features}


def _userfaultfd(_pid: int) -> str:
    os.close(kernel.open_userfaultfd())
    return "asynchronous write protection"


def _pagemap_scan(pid: int) -> str:
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    slot = ctypes.create_string_buffer(24)
    try:
        kernel.pagemap_scan(
            pagemap,
            0,
            kernel.PAGE_BYTES,
            require=kernel.WRITTEN,
            vec_address=ctypes.addressof(slot),
            vec_len=1,
        )
    finally:
        os.close(pagemap)
    return "scan and re-arm in one call"


def _process_vm_readv(pid: int) -> str:
    readable = next(m for m in read_maps(pid) if m.perms.startswith("r") and m.kind == "file")
    target = ctypes.create_string_buffer(8)
    iov = (ctypes.c_uint64 * 2)(readable.start, 8)
    kernel.process_vm_readv(pid, ctypes.addressof(target), 8, ctypes.addressof(iov), 1)
    return "memory of this process can be read"


def _ptrace_scope(_pid: int) -> str:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return "no Yama: same user suffices"
    known = {"0": "same user suffices", "1": "only descendants, or CAP_SYS_PTRACE", "2": "CAP_SYS_PTRACE only"}
    if scope not in known:
        raise PermissionError(f"ptrace_scope {scope}: attaching is disabled")
    return f"ptrace_scope {scope}: {known[scope]}"


def _smaps(pid: int) -> str:
    return f"{len(read_smaps(pid))} mappings"


def _smaps_rollup(pid: int) -> str:
    return f"{read_usage(pid).anonymous_bytes >> 20} MiB anonymous"


def _cgroup(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
    unified = any(line.startswith("0::") for line in lines)
    legacy = any(not line.startswith("0::") for line in lines)
    if unified and legacy:
        memory = any("memory" in line.split(":")[1].split(",") for line in lines)
        return f"hybrid, memory controller on version {1 if memory else 2}"
    return "version 2" if unified else "version 1"


# Each check returns what it found, or raises.
_CHECKS: tuple[tuple[str, Callable[[int], str]], ...] = (
    ("userfaultfd_wp_async", _userfaultfd),
    ("pagemap_scan", _pagemap_scan),
    ("process_vm_readv", _process_vm_readv),
    ("ptrace_scope", _ptrace_scope),
    ("smaps", _smaps),
    ("smaps_rollup", _smaps_rollup),
    ("cgroup", _cgroup),
)


def probe(pid: int | None = None) -> Probe:
    """Try every feature on process ``pid`` (default: this one)."""
    target = os.getpid() if pid is None else pid
    features = []
    for name, check in _CHECKS:
        try:
            features.append(Feature(name, available=True, detail=check(target)))
        except CaptureError as error:
            features.append(Feature(name, available=False, detail=error.reason))
        except Exception as error:  # a boundary: whatever an odd kernel answers, the feature is absent
            features.append(Feature(name, available=False, detail=str(error) or type(error).__name__))
    return Probe(tuple(features))
