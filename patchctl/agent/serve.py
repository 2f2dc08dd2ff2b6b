"""``patchctl engine serve``: binds, recovers, starts the processes, then answers until it is told to stop."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvicorn

from engine.build import read_manifest
from patchctl.admission.policy import PolicySet
from patchctl.admission.select import select_engine
from patchctl.agent.agent import Agent
from patchctl.agent.api import create_app
from patchctl.agent.context import HostContext
from patchctl.agent.evidence import record_generation
from patchctl.agent.host import EngineHost
from patchctl.agent.inbox import Inbox
from patchctl.agent.peer import PeerProtocol
from patchctl.agent.settings import Settings
from patchctl.agent.watch import MemoryWatch
from patchctl.errors import ExitCode, PatchctlError
from patchctl.home import Home
from patchctl.journal.journal import Journal
from patchctl.journal.record import GenerationRecord
from patchctl.store import BuildStore
from snapshots.store.store import SnapshotStore

# Open event streams of a transaction that is going back get this long to read its end.
_GRACE_S = 5


def serve(
    home: Home,
    *,
    build: Path | None,
    listen: tuple[str, int],
    settings: Settings,
    policy: PolicySet,
    trusted_roots: Mapping[str, str],
    on_ready: Callable[[dict[str, Any]], None],
) -> None:
    """Run the host until SIGINT or SIGTERM; returns when every process it started has ended.

    ``build`` is what a host without a journal starts with; afterwards the journal decides.

    Raises:
        PatchctlError: another agent owns the home, the port is taken, there is no build to serve, the
            committed build is damaged, or the processes cannot be kept running.
    """
    home.host.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.evidence.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_exclusive(home))
        tcp = stack.enter_context(_bind(listen))
        journal = Journal(home.journal)
        store = BuildStore(home.store)
        journal.recover()
        committed = _first_build(journal, store, build)
        store.verify(committed.digest)
        host = EngineHost(tcp, restarts_max=settings.restarts_max)
        watch = MemoryWatch(host, settings.bake.sample_s)
        context = HostContext(
            home=home,
            settings=settings,
            journal=journal,
            host=host,
            store=store,
            inbox=Inbox(home.inbox),
            policy=policy,
            policy_engine=select_engine(os.environ),
            trusted_roots=trusted_roots,
            watch=watch,
            snapshots=SnapshotStore(home.host_snapshots, settings.retention),
            stopping=threading.Event(),
        )
        url = "http://{}:{}".format(*tcp.getsockname()[:2])
        agent = Agent(context, url)
        try:
            host.start(committed.number, store.path(committed.digest), committed.digest)
            record_generation(context, committed.number)
            watch.start()
            agent.start()
            _answer(agent, home.socket, lambda: on_ready(_ready(url, home, committed)))
        finally:
            agent.stop()
            home.socket.unlink(missing_ok=True)
        if agent.failed is not None:
            raise agent.failed


def _answer(agent: Agent, path: Path, on_ready: Callable[[], None]) -> None:
    """Serve the agent API on its unix socket until a signal arrives."""
    path.unlink(missing_ok=True)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The folder is 0700 and the peer is checked, so the socket itself needs no tighter mode than this.
    old_mask = os.umask(0o177)
    try:
        unix.bind(str(path))
    finally:
        os.umask(old_mask)
    config = uvicorn.Config(
        create_app(agent),
        http=PeerProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
    )

    class _Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

    server = _Server(config)

    def stop() -> None:
        server.should_exit = True

    agent.on_failed = stop
    # uvicorn raises the signal that stopped it once more when it is done. The default action would
    # end this process before it has ended its children.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda _signum, _frame: None)
    server.run(sockets=[unix])


def _ready(url: str, home: Home, committed: GenerationRecord) -> dict[str, Any]:
    return {
        "url": url,
        "socket": str(home.socket),
        "version": committed.version,
        "generation": committed.number,
        "digest": committed.digest,
    }


def _first_build(journal: Journal, store: BuildStore, build: Path | None) -> GenerationRecord:
    committed = journal.committed()
    if committed is not None:
        return committed
    if build is None:
        raise PatchctlError(
            code="host.no_build",
            what="the engine host did not start",
            why="its journal has no committed build yet and none was given",
            exit_code=ExitCode.USAGE,
            serving="nothing",
            next_command="patchctl engine serve --build DIR",
        )
    if not build.is_dir():
        raise PatchctlError(
            code="build.missing",
            what="the engine host did not start",
            why=f"there is no folder {build}",
            exit_code=ExitCode.NOT_FOUND,
            serving="nothing",
            next_command=f"ls -ld {build}",
        )
    digest = store.import_build(build)
    version = read_manifest(store.path(digest)).version
    journal.commit_generation(journal.add_generation(digest, version, None), None, {})
    committed = journal.committed()
    assert committed is not None
    return committed


def _bind(listen: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(listen)
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        raise PatchctlError(
            code="host.port_busy",
            what="the engine host did not start",
            why=f"cannot listen on {listen[0]}:{listen[1]}: {getattr(error, 'strerror', None) or error}",
            exit_code=ExitCode.USAGE,
            serving="whatever already listens there",
            next_command="patchctl engine serve … --listen HOST:OTHER-PORT",
        ) from error
    return sock


def _exclusive(home: Home) -> ExitStack:
    """Hold the home's agent lock."""
    stack = ExitStack()
    lock = stack.enter_context((home.host / "agent.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stack.close()
        raise PatchctlError(
            code="host.running",
            what="a second agent was not started",
            why=f"another agent owns {home.host}",
            exit_code=ExitCode.FENCED,
            serving="what that agent serves, untouched",
            next_command="patchctl status",
        ) from error
    return stack
