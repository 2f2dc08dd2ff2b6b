"""Request path 1.0.1: the fix. One frame per stream, reused for every event, gone when the stream closes.

The replay log of 1.0.0 is removed: no client of ours resumes a stream. The bytes on the wire are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.front.path import Message, PathServices

# Large enough for any usual event; a larger one gets a frame of its own size.
FRAME_BYTES = 1024
_PREFIX = b"data: "
_SUFFIX = b"\n\n"


class StreamWriter:
    """Builds every event in the stream's one frame."""

    def __init__(self) -> None:
        self._frame = memoryview(bytearray(FRAME_BYTES))

    def event(self, data: bytes) -> memoryview:
        """Frame one server-sent event; the result is valid until the next call."""
        size = len(_PREFIX) + len(data) + len(_SUFFIX)
        if size > len(self._frame):
            self._frame = memoryview(bytearray(size))
        self._frame[:size] = _PREFIX + data + _SUFFIX
        return self._frame[:size]

    def close(self) -> None:
        """Let go of the frame."""
        self._frame = memoryview(b"")


class RequestPath:
    """The model's own tokenizer and chat template, and plain streams."""

    def __init__(self, services: PathServices) -> None:
        self._services = services

    def encode(self, text: str, *, add_special: bool) -> Sequence[int]:
        """Token ids of ``text``."""
        return self._services.encode(text, add_special)

    def chat_prompt(self, messages: Sequence[Message]) -> str:
        """Prompt text of a chat."""
        return self._services.render_chat(messages)

    def open_stream(self, response_id: str) -> StreamWriter:  # noqa: ARG002 - part of the protocol
        """A writer for one streamed response."""
        return StreamWriter()


def create(services: PathServices) -> RequestPath:
    """Entry point the front calls."""
    return RequestPath(services)
