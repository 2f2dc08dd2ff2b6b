"""Named points at which a test can make this process die, as a crash or power loss would.

``PATCHCTL_FAULT=deploy.swap.outcome`` kills the process with SIGKILL when it reaches that point.
"""

from __future__ import annotations

import os
import signal

_ARMED = os.environ.get("PATCHCTL_FAULT", "")


def reach(point: str) -> None:
    """Die here if a test asked for it."""
    if point == _ARMED:
        os.kill(os.getpid(), signal.SIGKILL)
