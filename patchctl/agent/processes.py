"""One child process of the host, front or engine: how it is started and how it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from engine.attach import attach_pair, send_data_socket
from engine.wire import Stop
from patchctl.agent.link import ControlLink
from patchctl.errors import PatchctlError

Role = Literal["front", "engine"]
ROLES: tuple[Role, ...] = ("front", "engine")

# A front finishes its open responses on Stop; after this it is killed.
_STOP_S_MAX = 10.0
# A socket pair is in the child's queue at once, unless the child is stuck with a full queue.
_ATTACH_S_MAX = 5.0

# mallopt(3): serve all but the largest buffers from one heap and keep what is freed there. A step's
# buffers then neither cost page faults nor move resident memory up and down under the growth estimate.
# 32 MiB is the largest mmap threshold glibc takes.
_STEADY_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


@dataclass(slots=True)
class Child:
    """A running process and the agent's ends of its control and attach sockets."""

    role: Role
    process: subprocess.Popen[bytes]
    link: ControlLink
    attach: socket.socket

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def lost(self) -> str:
        """Why it has to be replaced: it ended, or it stopped answering; "" while it works."""
        status = self.process.poll()
        if status is None:
            return self.link.broken
        return f"killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def hand_over(self, data: socket.socket) -> None:
        """Give it its end of a data socket.

        Raises:
            PatchctlError: ``host.process_gone``.
        """
        try:
            send_data_socket(self.attach, data)
        except OSError as error:
            raise self.link.gone(f"its attach socket failed: {error}") from error

    def kill(self) -> None:
        """End it by force; returns when it is reaped."""
        self.process.kill()
        self._close()
        self.process.wait()

    def _close(self) -> None:
        self.link.close()
        self.attach.close()


def stop_all(children: Iterable[Child]) -> None:
    """End them in order, all at once, by force only if they do not listen; returns when all are reaped."""
    ending = tuple(children)
    for child in ending:
        with suppress(PatchctlError):
            child.link.request(Stop(), timeout_s=2.0)
    for child in ending:
        child._close()  # noqa: SLF001 - same module: end of file is the second way to say Stop
    for child in ending:
        try:
            child.process.wait(timeout=_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def start_child(role: Role, listen: socket.socket) -> Child:
    """Start a process that serves nothing yet; the front inherits ``listen``.

    Raises:
        PatchctlError: ``host.spawn_failed``.
    """
    control, control_there = socket.socketpair()
    attach, attach_there = attach_pair()
    attach.settimeout(_ATTACH_S_MAX)
    given = [attach_there, control_there, *([listen] if role == "front" else [])]
    fds = [sock.fileno() for sock in given]
    with control_there, attach_there:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"patchctl.agent.{role}_main", *map(str, fds)],
                pass_fds=fds,
                # One thread a process: on shared cores a second OpenMP thread spins against the front.
                env={"OMP_NUM_THREADS": "1", **_STEADY_HEAP, **os.environ},
                stdin=subprocess.DEVNULL,
                # Its own process group: a Ctrl-C at the terminal reaches the agent alone, which then drains.
                process_group=0,
            )
        except OSError as error:
            control.close()
            attach.close()
            raise _not_started(role, error) from error
    return Child(role, process, ControlLink(role, control), attach)


def _not_started(role: Role, error: OSError) -> PatchctlError:
    return PatchctlError(
        code="host.spawn_failed",
        what=f"the {role} process was not started",
        why=error.strerror or str(error),
        serving="nothing until it is",
        next_command="free -m; ulimit -a",
    )
