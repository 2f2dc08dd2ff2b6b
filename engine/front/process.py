"""The front process: one event loop for HTTP, the agent, and whichever engine is attached."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

from engine.front.admission import AdmissionQueue
from engine.front.app import Front, make_app
from engine.front.connection import adopt_connections
from engine.front.control import ControlServer
from engine.front.generations import Generations
from engine.front.link import EngineLink
from engine.front.memory import freeze, reclaim
from engine.front.metrics import Metrics
from engine.lifetime import die_with_parent

# Responses in flight may end by themselves after Stop; then they end with an error their clients see.
_DRAIN_S_MAX: Final = 10.0
# Time for those last error events to be written.
_FLUSH_S_MAX: Final = 2
# Connections, idle ones included: beyond it uvicorn answers 503 without reading a body.
_CONNECTIONS_MAX: Final = 1024
# Longer than the usual 60 s of a load balancer, which must be the side that closes.
_KEEP_ALIVE_S: Final = 75
# A client that takes nothing for so long is gone: its response ends, and a generation it held can be freed.
_STALLED_MS_MAX: Final = 60_000


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: the process has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


def run(attach_fd: int, control_fd: int, listen_fd: int, *, arm: Callable[[], dict[str, Any]]) -> int:
    """Serve until the agent says Stop or goes away; returns the exit status.

    Engines come and go: requests are refused while none is attached, and those in flight at one that is lost
    end with an error.

    Args:
        attach_fd: this process's end of :func:`engine.attach.attach_pair`; engines' data sockets arrive there.
        control_fd: connected stream socket to the agent.
        listen_fd: listening socket for HTTP.
        arm: called on Arm, to start write tracking of this process's memory.
    """
    die_with_parent()
    # One request is tokenised at a time: a thread pool inside the tokenizer would only take cores from the engine.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    attach, control, listen = (socket.socket(fileno=fd) for fd in (attach_fd, control_fd, listen_fd))
    if listen.family in (socket.AF_INET, socket.AF_INET6):
        # Accepted sockets inherit it. Unlike a timer here it also ends what waits in the kernel's buffers.
        listen.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MS_MAX)
    with attach:
        asyncio.run(_serve(attach, control, listen, arm))
    return 0


async def _serve(
    attach: socket.socket, control: socket.socket, listen: socket.socket, arm: Callable[[], dict[str, Any]]
) -> None:
    loop = asyncio.get_running_loop()
    metrics = Metrics()

    def on_freed() -> None:
        # Later, when the frames of the last response have let go of the generation.
        loop.call_soon(reclaim)

    generations = Generations(on_freed)
    link = EngineLink(generations, metrics, AdmissionQueue(loop.time()))
    reader, writer = await asyncio.open_connection(sock=control)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="front-worker") as worker:
        front = Front(generations, link, metrics, worker)
        server = _Server(_config(front))

        def stop() -> None:
            if not front.stopping:
                front.stopping = True
                server.should_exit = True
                loop.call_later(_DRAIN_S_MAX, link.fail_all, "front_stopping", "the front is stopping")

        loop.add_signal_handler(signal.SIGTERM, stop)
        # A Ctrl-C reaches the whole process group; the agent decides when its processes end.
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        tasks = [
            asyncio.ensure_future(ControlServer(front, arm, stop).serve(reader, writer)),
            asyncio.ensure_future(adopt_connections(attach, link.connect)),
        ]
        freeze()
        try:
            await server.serve(sockets=[listen])
        finally:
            for task in tasks:
                task.cancel()
            link.close()


def _config(front: Front) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(front),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS_MAX,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(_DRAIN_S_MAX) + _FLUSH_S_MAX,
    )
