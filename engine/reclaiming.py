"""Carries out ``Reclaim``: sets the hook's policy in the loop's thread, then runs it if asked to."""

from __future__ import annotations

from concurrent.futures import Future

from engine.loop import ServeLoop
from engine.reclaim import ReclaimPolicy
from engine.watch import StepWatch
from engine.wire import Reclaim, Reply

_STOPPING = Reply("stopping", "the engine is stopping")


def reclaim(message: Reclaim, loop: ServeLoop, watch: StepWatch, blocks_max: int) -> Future[Reply]:
    """The reply tells the policy in force and, after a run, the bytes it freed.

    Args:
        message: what was asked for.
        loop: whose boundary everything happens at.
        watch: has the hook.
        blocks_max: KV blocks that one run may free; 0 when nothing serves.

    Raises:
        ReclaimRefusedError: thresholds that contradict each other.
    """
    policy = None if message.policy is None else ReclaimPolicy(message.policy, message.high, message.low)
    reply: Future[Reply] = Future()

    def configure() -> None:
        if policy is not None:
            watch.reclaim.configure(policy)

    def configured(call: Future[None]) -> None:
        if call.cancelled():
            reply.set_result(_STOPPING)
        elif message.now and blocks_max:
            watch.free(blocks_max).add_done_callback(freed)
        else:
            reply.set_result(Reply(data=watch.reclaim.as_dict()))

    def freed(run: Future[int]) -> None:
        if run.cancelled():
            reply.set_result(_STOPPING)
        else:
            reply.set_result(Reply(data={"freed_bytes": run.result(), **watch.reclaim.as_dict()}))

    loop.call(configure).add_done_callback(configured)
    return reply
