"""The transparency log on disk: append-only, fsynced, one writer at a time.

``log.entries`` holds one base64 line per entry; ``log.checkpoint`` the last signed note. The entry is on disk
before the checkpoint that promises it, so a crash leaves at most an entry nobody was told of, or a torn last
line that the next writer removes. A log shorter than, or different from, its own checkpoint is refused.
"""

from __future__ import annotations

import base64
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from patchctl.atomic import write_atomic
from patchctl.errors import PatchctlError
from patchctl.trust.keys import write_private
from patchctl.trust.merkle import MerkleTree
from patchctl.trust.note import checkpoint_text, parse_checkpoint, sign_text
from patchctl.trust.refusal import refusal

_ENTRIES: Final = "log.entries"
_CHECKPOINT: Final = "log.checkpoint"
FILES: Final = (_ENTRIES, _CHECKPOINT)
# An append takes milliseconds; a lock held this long means a stuck process.
_LOCK_WAIT_S_MAX: Final = 30.0
_LOCK_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Inclusion:
    """Proof that an entry is in the log.

    Attributes:
        index: position of the entry; ``size`` entries are under ``root_hash``.
        hashes: inclusion proof, leaf to root (RFC 6962).
        checkpoint: the signed note over ``size`` and ``root_hash``.
    """

    index: int
    size: int
    root_hash: bytes
    hashes: tuple[bytes, ...]
    checkpoint: str


class Log:
    """One log, as one process sees it. ``sign`` makes the note signature over UTF-8 text bytes."""

    def __init__(self, folder: Path, origin: str, key_id: bytes, sign: Callable[[bytes], bytes]) -> None:
        self._folder = folder
        self._origin = origin
        self._key_id = key_id
        self._sign = sign
        self._tree = MerkleTree()
        self._offset_bytes = 0

    def create(self) -> None:
        """Write an empty log.

        Raises:
            OSError: the files exist, or cannot be written.
        """
        write_private(self._folder / _ENTRIES, b"")
        write_private(self._folder / _CHECKPOINT, self._checkpoint().encode())

    def size(self) -> int:
        """Number of entries now.

        Raises:
            PatchctlError: as :meth:`append`.
        """
        with self._locked() as fd:
            self._refresh(fd)
            return len(self._tree)

    def append(self, entry: bytes) -> Inclusion:
        """Add ``entry`` durably; returns its proof under a fresh checkpoint.

        Raises:
            PatchctlError: ``trust.log_damaged``, the log on disk is not the one this domain wrote, or
                ``trust.log_busy``, another process held the lock too long.
            OSError: the disk refused.
        """
        with self._locked() as fd:
            self._refresh(fd)
            line = base64.b64encode(entry) + b"\n"
            with os.fdopen(os.dup(fd), "ab") as out:
                out.write(line)
                out.flush()
                os.fsync(out.fileno())
            self._offset_bytes += len(line)
            index = self._tree.append(entry)
            checkpoint = self._checkpoint()
            write_atomic(self._folder / _CHECKPOINT, checkpoint.encode(), mode=0o600)
            hashes = tuple(self._tree.inclusion_proof(index))
            return Inclusion(index, len(self._tree), self._tree.root(), hashes, checkpoint)

    def _checkpoint(self) -> str:
        text = checkpoint_text(self._origin, len(self._tree), self._tree.root())
        return sign_text(text, self._origin, self._key_id, self._sign(text.encode()))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The entries file, open and locked against every other process and thread."""
        fd = os.open(self._folder / _ENTRIES, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + _LOCK_WAIT_S_MAX
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise refusal(
                            "log_busy",
                            "the log entry was not written",
                            f"another process has held {self._folder / _ENTRIES} for {_LOCK_WAIT_S_MAX:.0f} s",
                        ) from None
                    time.sleep(_LOCK_POLL_S)
            yield fd
        finally:
            os.close(fd)

    def _refresh(self, fd: int) -> None:
        """Read what other processes appended since; drop a torn last line; compare with the checkpoint."""
        size_bytes = os.fstat(fd).st_size
        if size_bytes < self._offset_bytes:
            raise _damaged(f"{_ENTRIES} became shorter")
        with os.fdopen(os.dup(fd), "rb") as stream:
            stream.seek(self._offset_bytes)
            complete, newline, torn = stream.read().rpartition(b"\n")
        entries = [_decode_line(line) for line in complete.split(b"\n")] if newline else []
        for entry in entries:
            self._tree.append(entry)
        self._offset_bytes += len(complete) + len(newline)
        if torn:
            os.ftruncate(fd, self._offset_bytes)
            os.fsync(fd)
        try:
            last = parse_checkpoint((self._folder / _CHECKPOINT).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _damaged(f"{_CHECKPOINT} is missing or malformed") from error
        if last.size > len(self._tree) or self._tree.root(last.size) != last.root_hash:
            raise _damaged(f"{_ENTRIES} is not the log that {_CHECKPOINT} commits to")


def _damaged(why: str) -> PatchctlError:
    command = "restore the domain's folder from a backup"
    return refusal("log_damaged", "the transparency log was not used", why, next_command=command)


def _decode_line(line: bytes) -> bytes:
    try:
        return base64.b64decode(line, validate=True)
    except ValueError as error:
        raise _damaged(f"{_ENTRIES} has a malformed line") from error
