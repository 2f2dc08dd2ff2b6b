"""What a process has mapped: ``/proc/<pid>/maps``, ``smaps``, ``smaps_rollup`` and ``stat`` (proc(5))."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from snapshots.capture.errors import AccessDeniedError, CaptureError, ProcessGoneError
from snapshots.model import RegionKind

_KIB = 1024
_HEX_DIGITS = frozenset("0123456789abcdef")
# Device nodes below /dev are memory of a driver; these two are ordinary memory.
_ORDINARY_DEV = ("/dev/shm/", "/dev/zero")  # noqa: S108 - names to compare with, no file is made
_SPECIAL = ("[vdso]", "[vvar", "[vsyscall]", "[uprobes]")
_SMAPS_FIELDS = frozenset(("Rss", "Pss", "Anonymous", "Swap"))  # in KiB


@dataclass(frozen=True, slots=True)
class Mapping:
    """One mapping as ``maps`` lists it. ``end`` is exclusive.

    Attributes:
        offset: of ``start`` in the file, in bytes.
        inode: of the file on its device; 0 for memory without one.
    """

    start: int
    end: int
    perms: str
    name: str
    kind: RegionKind
    offset: int = 0
    inode: int = 0

    @property
    def private(self) -> bool:
        """Copy-on-write: writes stay in this process."""
        return self.perms[3] == "p"

    @property
    def writable(self) -> bool:
        """The process may write it now."""
        return self.perms[1] == "w"


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory figures of one mapping or of a whole process, in bytes. ``flags`` as in ``VmFlags``."""

    rss_bytes: int = 0
    pss_bytes: int = 0
    anonymous_bytes: int = 0
    swap_bytes: int = 0
    flags: frozenset[str] = frozenset()


@contextlib.contextmanager
def reading(pid: int) -> Iterator[None]:
    """Turn the errors of reading ``/proc/<pid>`` into this package's own.

    Raises:
        ProcessGoneError: the process ended.
        AccessDeniedError: the kernel refused.
        CaptureError: anything else, e.g. a kernel without the file.
    """
    try:
        yield
    except ProcessLookupError as error:
        raise ProcessGoneError(pid, "it ended") from error
    except PermissionError as error:
        raise AccessDeniedError(pid, str(error)) from error
    except FileNotFoundError as error:
        if _exists(pid):
            raise CaptureError(pid, f"this kernel has no {error.filename}") from error
        raise ProcessGoneError(pid, "it ended") from error
    except OSError as error:
        raise CaptureError(pid, str(error)) from error


def _exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb"):  # noqa: PTH123 - /proc is no tree of files to build paths on
            return True
    except OSError:
        return False


def _read(pid: int, name: str) -> str:
    with reading(pid), open(f"/proc/{pid}/{name}", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        return file.read()


def kind_of(perms: str, name: str) -> RegionKind:
    """Class a mapping by its permissions and name; the first that applies."""
    kinds: tuple[tuple[RegionKind, bool], ...] = (
        ("special", name.startswith(_SPECIAL)),
        ("hugetlb", "hugepage" in name),
        ("device", name.startswith("/dev/") and not name.startswith(_ORDINARY_DEV)),
        ("shared", perms[3] == "s"),
        ("heap", name == "[heap]"),
        ("stack", name == "[stack]"),
        ("anon", not name or name.startswith("[anon")),
    )
    return next((kind for kind, applies in kinds if applies), "file")


def _mapping(line: str) -> Mapping:
    fields = line.split(maxsplit=5)
    start, _, end = fields[0].partition("-")
    name = fields[5].rstrip() if len(fields) > 5 else ""  # noqa: PLR2004 - the sixth field is the name
    return Mapping(
        start=int(start, 16),
        end=int(end, 16),
        perms=fields[1],
        name=name,
        kind=kind_of(fields[1], name),
        offset=int(fields[2], 16),
        inode=int(fields[4]),
    )


def parse_maps(text: str) -> tuple[Mapping, ...]:
    """The mappings of a ``maps`` text, in address order."""
    return tuple(_mapping(line) for line in text.splitlines())


def parse_smaps(text: str) -> tuple[tuple[Mapping, Usage], ...]:
    """The mappings of a ``smaps`` text with their usage. Unknown fields are skipped: kernels add them."""
    found: list[tuple[Mapping, Usage]] = []
    mapping: Mapping | None = None
    figures: dict[str, int] = {}
    for line in text.splitlines():
        if line[0] in _HEX_DIGITS:
            mapping, figures = _mapping(line), {}
            continue
        key, _, value = line.partition(":")
        if key in _SMAPS_FIELDS:
            figures[key] = int(value.split()[0])
        elif key == "VmFlags" and mapping is not None:  # always the last line of a mapping
            flags = frozenset(value.split())
            found.append((_with_flags(mapping, flags), _usage(figures, flags)))
    return tuple(found)


def _usage(figures: dict[str, int], flags: frozenset[str] = frozenset()) -> Usage:
    rss, pss, anonymous, swap = (figures.get(key, 0) * _KIB for key in ("Rss", "Pss", "Anonymous", "Swap"))
    return Usage(rss, pss, anonymous, swap, flags)


def _with_flags(mapping: Mapping, flags: frozenset[str]) -> Mapping:
    """Correct the kind by what only the flags tell: device memory (io, pf) and hugetlb (ht)."""
    kind: RegionKind = mapping.kind
    if "ht" in flags:
        kind = "hugetlb"
    elif flags & {"io", "pf"} and kind != "special":
        kind = "device"
    return replace(mapping, kind=kind)


def read_maps(pid: int) -> tuple[Mapping, ...]:
    """The mappings of a process; cheap (no page tables are walked).

    Raises:
        CaptureError: see :func:`reading`.
    """
    return parse_maps(_read(pid, "maps"))


def read_smaps(pid: int) -> tuple[tuple[Mapping, Usage], ...]:
    """The mappings of a process with their usage; the kernel walks its page tables.

    Raises:
        CaptureError: see :func:`reading`.
    """
    return parse_smaps(_read(pid, "smaps"))


def _read_figures(pid: int, name: str, wanted: frozenset[str]) -> dict[str, int]:
    """Fields of a ``Key: 123 kB`` text, in KiB."""
    figures: dict[str, int] = {}
    for line in _read(pid, name).splitlines():
        key, _, value = line.partition(":")
        if key in wanted:
            figures[key] = int(value.split()[0])
    if not figures:  # a zombie has no memory
        raise ProcessGoneError(pid, "it ended")
    return figures


def read_usage(pid: int) -> Usage:
    """Totals of a process from ``smaps_rollup``: exact; the kernel walks its page tables (13 ms per GiB).

    Raises:
        CaptureError: see :func:`reading`.
    """
    return _usage(_read_figures(pid, "smaps_rollup", _SMAPS_FIELDS))


@functools.cache
def status_is_exact() -> bool:
    """Whether ``RssAnon`` in ``status`` is summed over all CPUs when read (Linux 6.17).

    Before, it lags by up to 128 KiB per CPU: more than a small leak gathers in a bake.
    """
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (6, 17)


def read_anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process, swapped out or not, by the cheapest exact source: 0.1 ms from ``status``.

    Raises:
        CaptureError: see :func:`reading`.
    """
    if status_is_exact():
        return sum(_read_figures(pid, "status", frozenset(("RssAnon", "VmSwap"))).values()) * _KIB
    usage = read_usage(pid)
    return usage.anonymous_bytes + usage.swap_bytes


def read_swap_bytes(pid: int) -> int:
    """Memory of a process that is swapped out.

    Raises:
        CaptureError: see :func:`reading`.
    """
    return _read_figures(pid, "status", frozenset(("VmSwap",)))["VmSwap"] * _KIB


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot: with the pid it names one process for good.

    Raises:
        ProcessGoneError: no such process, or only its zombie is left.
    """
    text = _read(pid, "stat")
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in ("Z", "X"):
        raise ProcessGoneError(pid, "it ended")
    return int(fields[19])
