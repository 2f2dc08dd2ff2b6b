"""The thread for control work that takes long: it gives way to serving."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

# Below the serve loop. Not lower: a worker without CPU time may hold the interpreter lock meanwhile.
_WORKER_NICE = 5


def control_worker() -> ThreadPoolExecutor:
    """One niced thread, which runs one piece of work after the other."""
    return ThreadPoolExecutor(1, thread_name_prefix="control-worker", initializer=_be_nice)


def _be_nice() -> None:
    # On Linux a nice value belongs to a thread, and 0 means the calling one.
    os.setpriority(os.PRIO_PROCESS, 0, _WORKER_NICE)
    torch.set_grad_enabled(False)
