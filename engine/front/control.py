"""The control socket: the agent's messages to the front, one reply each, in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.framing import Decoder, FramingError, encode_frame
from engine.front.app import Front
from engine.front.checked import BuildRefusedError
from engine.front.generations import GenerationRefusedError
from engine.front.staging import load_generation
from engine.wire import Arm, Control, Release, Reply, Stage, Stats, Stop

_READ_BYTES: Final = 1 << 16
_log = logging.getLogger(__name__)


class ControlServer:
    """Answers control messages about one front.

    Args:
        front: what they act on.
        arm: starts write tracking of this process; returns what it did.
        stop: asks the process to finish; called once, after the reply to Stop or when the agent is gone.
    """

    def __init__(self, front: Front, arm: Callable[[], dict[str, Any]], stop: Callable[[], None]) -> None:
        self._front = front
        self._arm = arm
        self._stop = stop
        self._messages = msgspec.msgpack.Decoder(Control)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer until Stop, end of stream, or something that is not a frame."""
        frames = Decoder()
        try:
            while data := await reader.read(_READ_BYTES):
                for frame in frames.feed(data):
                    reply, last = await self._answer(frame)
                    writer.write(encode_frame(reply))
                    await writer.drain()
                    if last:
                        return
        except (FramingError, OSError):
            _log.exception("control socket failed")
        finally:
            self._stop()
            writer.close()

    async def _answer(self, frame: bytes) -> tuple[Reply, bool]:
        """The reply, and whether it is the last one."""
        try:
            message: Control = self._messages.decode(frame)
        except msgspec.MsgspecError as error:
            return Reply("bad_message", str(error)), False
        try:
            return Reply(data=await self._carry_out(message)), isinstance(message, Stop)
        except GenerationRefusedError as error:
            return Reply(error.code, str(error)), False
        except BuildRefusedError as error:
            return Reply("build_refused", str(error)), False
        except Exception as error:  # trust boundary: the agent gets a reply to every message
            _log.exception("%s failed", type(message).__name__)
            return Reply("internal", f"{type(error).__name__}: {error}"), False

    async def _carry_out(self, message: Control) -> dict[str, Any]:
        match message:
            case Stage():
                return await self._stage(message)
            case Release(generation=number):
                return {"responses_open": self._front.generations.release(number)}
            case Stats():
                return stats(self._front)
            case Arm():
                return self._arm()
            case Stop():
                return {}
            case _:
                raise GenerationRefusedError("not_for_front", f"{type(message).__name__} goes to the engine")

    async def _stage(self, message: Stage) -> dict[str, Any]:
        generations = self._front.generations
        if generations.check_room(message.generation, message.digest):
            resident = [one.assets for one in generations]
            generation = await asyncio.get_running_loop().run_in_executor(
                self._front.worker,
                lambda: load_generation(message.generation, Path(message.folder), message.digest, resident),
            )
            generations.add(generation)
        active = generations.active
        return {"generation": message.generation, "active": active is not None and active.number == message.generation}


def stats(front: Front) -> dict[str, Any]:
    """Reply to Stats: counters and window percentiles, and the resident generations."""
    active = front.generations.active
    return {
        **front.metrics.stats(),
        "engine_up": front.link.up,
        "inflight": front.link.running + front.link.waiting,
        "active_generation": None if active is None else active.number,
        "paths": [
            {"generation": one.number, "build": one.build, "responses_open": one.responses_open}
            for one in front.generations
        ],
    }
