"""Named points at which a test can make a process of the host die, as a crash or power loss would.

``PATCHCTL_FAULT=deploy.swap.outcome`` kills the process that reaches that point with SIGKILL.
``host.swap.intent=STOP:front,host.swap.exchanged=KILL:engine`` sends signals to the host's children
instead, in the order given. ``@FILE`` reads the same from a file each time, so that one host can be used
for several faults; without the file there are none.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_NOBODY: Mapping[str, int] = MappingProxyType({})


def _parse(text: str) -> tuple[tuple[str, str], ...]:
    """``(point, "SIGNAL:ROLE")`` pairs; an empty action means the reaching process itself."""
    return tuple((point, action) for point, _, action in (item.partition("=") for item in text.split(",")) if point)


_ARMED = os.environ.get("PATCHCTL_FAULT", "")


def _read(armed: str) -> str:
    try:
        return Path(armed[1:]).read_text(encoding="utf-8").strip() if armed.startswith("@") else armed
    except FileNotFoundError:
        return ""


def reach(point: str, pids: Mapping[str, int] = _NOBODY) -> None:
    """Do what a test asked for at ``point``; ``pids`` are the host's children by role."""
    if not _ARMED:
        return
    for armed, action in _parse(_read(_ARMED)):
        if point != armed:
            continue
        name, _, role = action.partition(":")
        if not role:
            os.kill(os.getpid(), signal.SIGKILL)
        elif role in pids:
            _send(pids[role], signal.Signals[f"SIG{name}"])


def _send(pid: int, signum: signal.Signals) -> None:
    os.kill(pid, signum)
    if signum is signal.SIGKILL:
        # The next line of the caller must find it dead; the child stays to be reaped by who started it.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
