"""The front and the engine of one host: replaced one by one, so that each outlives the other."""

from __future__ import annotations

import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from engine.wire import Arm, Stage
from patchctl.agent.link import ControlLink
from patchctl.agent.processes import ROLES, Child, Role, start_child, stop_all
from patchctl.errors import PatchctlError

# Loading and capturing SmolLM2 beside live traffic takes 5-10 s on two shared cores.
STAGE_S_MAX = 180.0


class ProcessPair:
    """Owns the two children. The caller makes sure that only one thread at a time replaces them.

    Args:
        listen: listening socket for HTTP. The agent keeps it, so it outlives every front: connections
            wait in its queue while a front is replaced.
    """

    def __init__(self, listen: socket.socket) -> None:
        self._listen = listen
        self._children: dict[Role, Child] = {}
        self._loading: dict[Role, Child] = {}
        self._closed = False
        # The kernel sends the children their parent-death signal when the *thread* that forked them
        # ends (prctl(2)), so they are all started from one that lives as long as this pair.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")
        self._starts: dict[Role, int] = dict.fromkeys(ROLES, 0)

    @property
    def starts(self) -> dict[Role, int]:
        """Processes started so far, by role: a count moves when its process was replaced."""
        return dict(self._starts)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that answer, by role."""
        return {role: child.pid for role, child in self._children.items() if not child.lost}

    def lost(self) -> dict[Role, str]:
        """Roles that have no working process, and why."""
        found = {role: self._children[role].lost if role in self._children else "not started" for role in ROLES}
        return {role: why for role, why in found.items() if why}

    def link(self, role: Role) -> ControlLink:
        """The control link to the process that holds ``role`` now.

        Raises:
            PatchctlError: ``host.down`` before the first start and after the end.
        """
        child = self._children.get(role)
        if child is None:
            raise _down(role)
        return child.link

    def replace(self, roles: Collection[Role], build: Stage) -> None:
        """End what is left of ``roles`` and start processes that hold ``build``, to be attached next.

        They are reachable by others only when they have loaded it: a process serves the first generation
        it is given.

        Raises:
            PatchctlError: a process died or refused the build; what was started has ended again.
        """
        for role in roles:
            if role in self._children:
                self._children[role].kill()  # its memory must be free before the next one loads
        try:
            for role in roles:
                self._loading[role] = self._spawner.submit(start_child, role, self._listen).result()
            self._check_open()
            for child in self._loading.values():
                child.link.call(build, STAGE_S_MAX)
                child.link.call(Arm())
        except BaseException:
            for child in self._loading.values():
                child.kill()
            self._loading = {}
            raise
        for role in self._loading:
            self._starts[role] += 1
        self._children, self._loading = self._children | self._loading, {}

    def _check_open(self) -> None:
        if self._closed:
            raise _down("running")

    def attach(self) -> None:
        """Connect front and engine by a new data socket, which replaces the one they have.

        Raises:
            PatchctlError: ``host.process_gone``.
        """
        front, engine = socket.socketpair()
        with front, engine:
            self._children["engine"].hand_over(engine)
            self._children["front"].hand_over(front)

    def give_up_loading(self) -> None:
        """Make a :meth:`replace` that is under way fail, now or as soon as it has started its processes."""
        self._closed = True
        for child in tuple(self._loading.values()):
            child.process.kill()

    def close(self) -> None:
        """End both processes for good."""
        self._closed = True
        children, self._children = self._children, {}
        stop_all(children[role] for role in ROLES if role in children)
        self._spawner.shutdown()


def _down(role: str) -> PatchctlError:
    return PatchctlError(
        code="host.down",
        what=f"the engine host has no {role} process",
        why="it is being started or stopped",
        serving="nothing for a moment",
        next_command="patchctl status",
    )
