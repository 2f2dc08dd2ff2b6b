"""How long a thread was ready to run and had no core: what tells a busy machine from a slow engine.

Source: ``/proc/<pid>/task/<tid>/schedstat``, time on a core and time on the run queue in ns
(sched-stats.rst). Other processes of the machine show here as well as our own.
"""

from __future__ import annotations

import math
import time
from pathlib import Path


class CoreWait:
    """Watches the thread of ``pid`` that computes most; find it while nothing else is under way."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}/task")
        self._before = {path.name: _times(path) for path in self._folder.iterdir()}
        self._thread = ""
        self._last: tuple[int, int] = (0, 0)

    def choose(self) -> None:
        """Settle on the thread that ran longest since this object was made: the serve loop."""
        ran = {
            name: _times(self._folder / name)[0] - before[0]
            for name, before in self._before.items()
            if (self._folder / name).exists()
        }
        self._thread = max(ran, key=lambda name: ran[name])
        self.lap()

    def lap(self) -> float:
        """Share of the time since the last lap that the thread waited for a core; nan where not told."""
        now_ns, (_, waited_ns) = time.monotonic_ns(), _times(self._folder / self._thread)
        (then_ns, waited_before_ns), self._last = self._last, (now_ns, waited_ns)
        return (waited_ns - waited_before_ns) / (now_ns - then_ns) if waited_ns else math.nan


def _times(thread: Path) -> tuple[int, int]:
    """(on a core, waiting for one) in ns; zeros from a kernel without these figures."""
    try:
        ran, waited, _ = (thread / "schedstat").read_text(encoding="ascii").split()
    except OSError:
        return 0, 0
    return int(ran), int(waited)
