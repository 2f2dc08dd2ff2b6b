"""Uploads: written aside, bounded, private to this user, and gone when their transaction ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from patchctl.errors import ExitCode, PatchctlError


class _Sink:
    def __init__(self, stream: BinaryIO, bytes_max: int) -> None:
        self._stream = stream
        self._left_bytes = bytes_max

    def write(self, chunk: bytes) -> None:
        self._left_bytes -= len(chunk)
        if self._left_bytes < 0:
            raise PatchctlError(
                code="api.upload_large",
                what="the upload was refused",
                why="it is larger than the agent takes",
                exit_code=ExitCode.USAGE,
                serving="the active generation, untouched",
                next_command="patchctl inspect FILE",
            )
        self._stream.write(chunk)


class Inbox:
    """A private folder of uploads, emptied when the agent starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            leftover.unlink()

    def path(self, op_id: str, part: str) -> Path:
        """Where a complete upload lies."""
        return self._folder / f"{op_id}.{part}"

    @contextmanager
    def receive(self, op_id: str, part: str, *, bytes_max: int) -> Iterator[_Sink]:
        """Take one upload; it appears under its name only when complete.

        Raises:
            PatchctlError: ``api.upload_large``, or ``api.upload_failed`` when the disk refuses.
        """
        aside = self._folder / f"{op_id}.{part}.partial"
        try:
            fd = os.open(aside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as stream:
                yield _Sink(stream, bytes_max)
            aside.rename(self.path(op_id, part))
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise PatchctlError(
                code="api.upload_failed",
                what="the agent could not store the upload",
                why=error.strerror or str(error),
                serving="the active generation, untouched",
                next_command="df -h",
            ) from error
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def clear(self, op_id: str) -> None:
        """Forget the uploads of ``op_id``."""
        for part in ("patch", "attestations"):
            self.path(op_id, part).unlink(missing_ok=True)
