"""The engine process: sockets, threads, and how they end.

Threads: this one reads control messages; the attacher takes data sockets and has the newest one read
into the serve loop; the serve loop owns the device; a worker stages; a replier answers in order. The
process outlives its front. It ends on ``Stop``, on end of file on the control socket (the agent died),
and when the serve loop fails.
"""

from __future__ import annotations

import logging
import queue
import signal
import socket
import threading
from concurrent.futures import CancelledError, Future

import msgspec
import torch

from engine import collector
from engine.attached import AttachedFront
from engine.controller import ArmHook, Controller, DigestTensors
from engine.framing import Connection, FramingError
from engine.graphs.select import select_device
from engine.lifetime import die_with_parent
from engine.loop import ServeLoop
from engine.wire import Control, Reply, Stop

_JOIN_S = 10.0
_log = logging.getLogger(__name__)


def _reply_in_order(control: Connection, replies: queue.SimpleQueue[Future[Reply] | None]) -> None:
    """Send each reply when it is due and those before it are sent."""
    while (future := replies.get()) is not None:
        try:
            reply = future.result()
        except CancelledError:
            reply = Reply("stopping", "the engine is stopping")
        try:
            control.send(reply)
        except FramingError as error:
            control.send(Reply("reply_too_large", str(error)))
        except OSError:
            return


def _serve_control(
    control: Connection, controller: Controller, replies: queue.SimpleQueue[Future[Reply] | None]
) -> None:
    """Until ``Stop`` or end of file."""
    decoder = msgspec.msgpack.Decoder(Control)
    while (frame := control.recv()) is not None:
        message = decoder.decode(frame)
        replies.put(controller.handle(message))
        if isinstance(message, Stop):
            return


def run(attach_fd: int, control_fd: int, *, arm: ArmHook, digest_tensors: DigestTensors, threads: int = 1) -> int:
    """Serve until told to stop; call it from the main thread of a process of its own.

    Args:
        attach_fd: socket on which the agent hands over data sockets to the front (see :mod:`engine.attach`).
        control_fd: connected stream socket to the agent.
        arm: starts write tracking of this process; its result is the reply to ``Arm``.
        digest_tensors: maps named uint8 ``[n]`` arrays to digests, for ``Inspect``.
        threads: CPU threads of one step; 1 is best on shared cores.

    Returns:
        The exit status: 0, or 1 when the serve loop or the control connection failed.
    """
    die_with_parent()
    # Ctrl-C goes to the whole terminal group; the agent then stops us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    control = Connection.from_fd(control_fd)
    replies: queue.SimpleQueue[Future[Reply] | None] = queue.SimpleQueue()
    failed = threading.Event()
    loop = ServeLoop()
    front = AttachedFront(socket.socket(fileno=attach_fd), loop)
    controller = Controller(loop, device=select_device(), arm=arm, digest_tensors=digest_tensors)

    def serve() -> None:
        try:
            loop.run()
        except Exception:
            # Nothing sensible can be served after a defect in the loop; the agent restarts the last build.
            _log.exception("the serve loop failed")
            failed.set()
            control.shutdown()

    serving = threading.Thread(target=serve, name="serve", daemon=True)
    attaching = threading.Thread(target=front.run, name="attacher", daemon=True)
    replying = threading.Thread(target=_reply_in_order, args=(control, replies), name="replier", daemon=True)
    collector.exempt_present()
    for thread in (serving, attaching, replying):
        thread.start()
    try:
        _serve_control(control, controller, replies)
    except (OSError, FramingError, msgspec.MsgspecError):
        _log.exception("the control connection failed")
        failed.set()
    # Teardown: everything a thread may wait for is ended before the thread is joined.
    loop.stop()
    front.stop()
    for thread in (serving, attaching):
        thread.join(_JOIN_S)
    controller.close()
    replies.put(None)
    replying.join(_JOIN_S)
    control.shutdown()
    return 1 if failed.is_set() else 0
