"""Entry point of the engine process: joins the engine with the snapshot hooks it may not import."""

from __future__ import annotations

import sys
from dataclasses import asdict

from engine.process import run
from snapshots.capture.state import digest_tensors
from snapshots.capture.uffd import arm_self

if __name__ == "__main__":
    data_fd, control_fd = (int(argument) for argument in sys.argv[1:])
    sys.exit(run(data_fd, control_fd, arm=lambda: asdict(arm_self()), digest_tensors=digest_tensors))
