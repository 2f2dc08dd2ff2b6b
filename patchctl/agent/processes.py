"""The front and engine processes of one host: started together, stopped together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from engine.wire import Stop
from patchctl.agent.link import ControlLink
from patchctl.errors import PatchctlError

# A front finishes its open responses on Stop; after this it is killed.
_STOP_S_MAX = 10.0


# mallopt(3): serve all but the largest buffers from one heap and keep what is freed there. A step's
# buffers then neither cost page faults nor move resident memory up and down under the growth estimate.
# 32 MiB is the largest mmap threshold glibc takes.
_STEADY_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


@dataclass(slots=True)
class Processes:
    """A running pair and the agent's links to it."""

    front: subprocess.Popen[bytes]
    engine: subprocess.Popen[bytes]
    front_link: ControlLink
    engine_link: ControlLink

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {"front": self.front.pid, "engine": self.engine.pid}

    def dead(self) -> str:
        """The role of a process that ended, or ""."""
        for role, process in (("engine", self.engine), ("front", self.front)):
            if process.poll() is not None:
                return role
        return ""

    def stop(self) -> None:
        """End both, politely first; returns when both are reaped."""
        for link in (self.front_link, self.engine_link):
            try:
                link.request(Stop(), timeout_s=2.0)
            except PatchctlError:
                continue
        self.front_link.close()
        self.engine_link.close()
        for process in (self.front, self.engine):
            try:
                process.wait(timeout=_STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_processes(listen: socket.socket) -> Processes:
    """Start an engine and a front that share a data socket; neither serves a build yet."""
    data_front, data_engine = socket.socketpair()
    front_here, front_there = socket.socketpair()
    engine_here, engine_there = socket.socketpair()
    there = (data_front, data_engine, front_there, engine_there)
    # One thread a process: on shared cores a second OpenMP thread spins against the front.
    environment = {"OMP_NUM_THREADS": "1", **_STEADY_HEAP, **os.environ}
    try:
        engine = _spawn("patchctl.agent.engine_main", [data_engine, engine_there], environment)
        try:
            front = _spawn("patchctl.agent.front_main", [data_front, front_there, listen], environment)
        except OSError:
            engine.kill()
            engine.wait()
            raise
    finally:
        for sock in there:
            sock.close()
    return Processes(front, engine, ControlLink("front", front_here), ControlLink("engine", engine_here))


def _spawn(module: str, sockets: list[socket.socket], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    fds = [sock.fileno() for sock in sockets]
    # Its own process group: a Ctrl-C at the terminal reaches the agent alone, which then drains.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, fds)],
        pass_fds=fds,
        env=environment,
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
