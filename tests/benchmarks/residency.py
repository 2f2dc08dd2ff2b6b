"""Resident memory of a process over time, from ``/proc/<pid>/status`` (proc_pid_status(5)).

VmRSS counts what the process has mapped and present: its own memory and the pages of mapped weight
files, not what merely lies in the page cache. Only the engine maps weights, so no page of theirs is
counted twice. Reading it costs microseconds; ``smaps_rollup`` walks every page table under the lock that
page faults need, 30 ms for a gigabyte, and would slow down what is measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.benchmarks.spans import Span

_EVERY_S = 0.05
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process, in bytes; ``anonymous`` is the part of ``resident`` that no file backs."""

    at_ns: int
    resident: int
    anonymous: int


def sample(pid: int) -> Sample:
    """Look now.

    Raises:
        OSError: the process is gone.
        KeyError: it is a zombie, which has no memory.
    """
    at_ns = time.monotonic_ns()
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        fields[name] = rest
    kib = {name: int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon")}
    return Sample(at_ns, kib["VmRSS"] * _KIB, kib["RssAnon"] * _KIB)


class Watch:
    """Samples a process 20 times a second until the block ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopping = threading.Event()
        self.samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, name=f"watch-{pid}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def inside(self, span: Span) -> Sequence[Sample]:
        """The samples taken in ``span``."""
        return [taken for taken in list(self.samples) if span.begin_ns <= taken.at_ns <= span.end_ns]

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            try:
                self.samples.append(sample(self._pid))
            except (OSError, KeyError):
                return
