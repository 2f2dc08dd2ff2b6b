"""The decision log: append-only JSON lines, each naming the digest of the line before it, fsynced one by one.

A head file beside the log holds the count and digest of the newest line, so cutting off the end shows
too. That finds accidents and edits by anyone who does not rewrite both files; against whoever does,
store the returned digest elsewhere (the caller signs it into its verdict).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import rfc8785

from patchctl.admission.decision import Decision
from patchctl.admission.facts import UInt
from patchctl.admission.policy import sha256_digest
from patchctl.atomic import fsync_dir, write_atomic
from patchctl.errors import ExitCode, PatchctlError

START = "sha256:" + "0" * 64  # "previous" of the first record


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line. ``index`` counts from 0; ``previous`` is the digest of the line before, without its newline."""

    index: UInt
    unix: UInt
    decision: Decision
    previous: str
    schema_version: Literal[1] = 1


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: UInt
    digest: str


@dataclass(frozen=True, slots=True)
class LogState:
    """A verified log: number of records, digest of the last line, bytes of a line a crash cut short."""

    count: int
    digest: str
    torn_bytes: int = 0


def _head_path(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def _broken(path: Path, why: str) -> PatchctlError:
    return PatchctlError(
        code="log.broken",
        what=f"the decision log {path.name} was altered or damaged; nothing is appended to it",
        why=why,
        exit_code=ExitCode.POLICY_DENIED,
    )


def _read_head(path: Path) -> _Head:
    try:
        return msgspec.json.decode(_head_path(path).read_bytes(), type=_Head)
    except FileNotFoundError:
        return _Head(0, START)
    except msgspec.MsgspecError as error:
        raise _broken(path, f"its head file does not parse: {error}") from error


def verify(path: Path) -> LogState:
    """Check every line of the log; a missing log is an empty one unless its head remembers records.

    Raises:
        PatchctlError: ``log.broken``: a record was edited, removed, reordered or cut off.
        OSError: the log cannot be read.
    """
    head = _read_head(path)
    count, previous, torn_bytes = 0, START, 0
    head_seen = head.count == 0
    if path.exists():
        with path.open("rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    torn_bytes = len(line)
                    break
                _check_line(path, line[:-1], count, previous)
                count, previous = count + 1, sha256_digest(line[:-1])
                if count == head.count:
                    if previous != head.digest:
                        raise _broken(path, f"record {count - 1} is not the one its head file remembers")
                    head_seen = True
    if not head_seen:
        raise _broken(path, f"it has {count} records, its head file remembers {head.count}")
    return LogState(count, previous, torn_bytes)


def _check_line(path: Path, line: bytes, index: int, previous: str) -> None:
    try:
        record = msgspec.json.decode(line, type=Record)
        canonical = rfc8785.dumps(msgspec.to_builtins(record))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _broken(path, f"record {index} does not parse: {error}") from error
    if canonical != line:
        raise _broken(path, f"record {index} is not in canonical form")
    if record.index != index or record.previous != previous:
        raise _broken(path, f"record {index} does not follow the record before it")


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The log opened for appending, with every other writer kept out."""
    made = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if made:
            fsync_dir(path.parent)
        yield descriptor
    finally:
        os.close(descriptor)


def _newest(path: Path, descriptor: int, head: _Head) -> LogState:
    """The log's end without reading all of it: right when the last line is the head's, else verify in full."""
    size_bytes = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _TAIL_BYTES, max(0, size_bytes - _TAIL_BYTES))
    if head.count and tail.endswith(b"\n"):
        line = tail[:-1].rpartition(b"\n")[2]
        if sha256_digest(line) == head.digest:
            return LogState(head.count, head.digest)
    return verify(path)


_TAIL_BYTES = 1 << 20  # a decision has a few KiB; a longer last line only costs a full verification


def append(path: Path, decision: Decision, *, unix: int) -> str:
    """Write one decision durably; returns the digest of its line.

    A line that a crash cut short was never acknowledged: it is removed first.

    Raises:
        PatchctlError: ``log.broken``: the log does not end where it ended last.
        OSError: not written; the caller must not act on the decision.
    """
    with _locked(path) as descriptor:
        state = _newest(path, descriptor, _read_head(path))
        if state.torn_bytes:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - state.torn_bytes)
        record = Record(index=state.count, unix=unix, decision=decision, previous=state.digest)
        line = rfc8785.dumps(msgspec.to_builtins(record))
        _write_all(descriptor, line + b"\n")
        os.fsync(descriptor)
        digest = sha256_digest(line)
        write_atomic(_head_path(path), msgspec.json.encode(_Head(state.count + 1, digest)), mode=0o600)
    return digest


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
