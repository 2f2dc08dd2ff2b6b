"""Entry point of the front process: joins the front with the snapshot hook it may not import."""

from __future__ import annotations

import sys

from engine.front.process import run
from patchctl.agent.hooks import arm_hook

if __name__ == "__main__":
    attach_fd, control_fd, listen_fd = (int(argument) for argument in sys.argv[1:])
    sys.exit(run(attach_fd, control_fd, listen_fd, arm=arm_hook))
