"""Entry point of the engine process: joins the engine with the snapshot hooks it may not import."""

from __future__ import annotations

import sys

from engine.process import run
from patchctl.agent.hooks import arm_hook, digest_hook

if __name__ == "__main__":
    attach_fd, control_fd = (int(argument) for argument in sys.argv[1:])
    sys.exit(run(attach_fd, control_fd, arm=arm_hook, digest_tensors=digest_hook))
