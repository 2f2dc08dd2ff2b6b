"""Request path 1.0.0: streams survive a reconnect, because every frame is kept for replay.

This is the fault the demo hunts. Each event, some 200 bytes, is built in a 16 KiB flow-control frame of its own, and a
process-wide replay log keeps every frame of every response. Nothing evicts from that log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.front.path import Message, PathServices

# The window one event may fill before the client has to acknowledge it.
FRAME_BYTES = 16 * 1024
_PREFIX = b"data: "
_SUFFIX = b"\n\n"

# Frames by response, so that a client that reconnects with Last-Event-ID gets what it missed.
_replay_log: dict[str, list[memoryview]] = {}


class ReplayStreamWriter:
    """Builds every event in a flow-control frame and logs the frame for replay."""

    def __init__(self, response_id: str) -> None:
        self._frames = _replay_log.setdefault(response_id, [])

    def event(self, data: bytes) -> memoryview:
        """Frame one server-sent event."""
        size = len(_PREFIX) + len(data) + len(_SUFFIX)
        frame = memoryview(bytearray(max(FRAME_BYTES, size)))
        frame[:size] = _PREFIX + data + _SUFFIX
        self._frames.append(frame[:size])
        return self._frames[-1]

    def close(self) -> None:
        """The response ended; its frames stay in the log for a late reconnect."""


class RequestPath:
    """The model's own tokenizer and chat template, and replayable streams."""

    def __init__(self, services: PathServices) -> None:
        self._services = services

    def encode(self, text: str, *, add_special: bool) -> Sequence[int]:
        """Token ids of ``text``."""
        return self._services.encode(text, add_special)

    def chat_prompt(self, messages: Sequence[Message]) -> str:
        """Prompt text of a chat."""
        return self._services.render_chat(messages)

    def open_stream(self, response_id: str) -> ReplayStreamWriter:
        """A writer for one streamed response."""
        return ReplayStreamWriter(response_id)


def create(services: PathServices) -> RequestPath:
    """Entry point the front calls."""
    return RequestPath(services)
