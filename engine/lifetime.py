"""Ties a child process's life to its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

# prctl(2).
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process when its parent process dies, even if someone else keeps our sockets open.

    The kernel sends the signal when the parent *thread* dies, so the handler looks whether the process
    is really gone. Call it from the main thread.
    """
    parent = os.getppid()

    def check(_signum: int, _frame: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGUSR1, check)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
