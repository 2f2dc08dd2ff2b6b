"""Captures the engine host: the memory of both processes, and the tensors of its generations."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from patchctl.agent.context import HostContext
from patchctl.snapshot_errors import explained
from snapshots.capture.contents import ContentReader
from snapshots.capture.pages import WriteTracker
from snapshots.capture.process import capture_process
from snapshots.model import GenerationState, HostSnapshot, TensorState
from snapshots.restore import LiveTensor
from snapshots.store.store import Stored
from snapshots.store.writer import TensorSource
from snapshots.tensor_chunks import whole_digest

_SERVING = "the active generation, untouched"
# What a later look back may need: the running transaction, and those that led to the builds one can return to.
_PINNED_TRANSACTIONS = 5
_NO_TRACKERS: Mapping[str, WriteTracker] = {}


@dataclass(frozen=True, slots=True)
class Captured:
    """A host snapshot, and where its tensors lie in the engine. ``tensors`` by generation and name."""

    snapshot: HostSnapshot
    engine_pid: int
    tensors: Mapping[int, Mapping[str, LiveTensor]]


def capture_host(
    context: HostContext,
    generations: Sequence[tuple[int, str]],
    *,
    serving: int,
    trackers: Mapping[str, WriteTracker] = _NO_TRACKERS,
) -> Captured:
    """Capture both processes and every tensor of ``generations`` (number and build digest); they keep serving.

    Raises:
        PatchctlError: ``snapshot.failed``, ``snapshot.denied``, or what a process answers.
    """
    host = context.host
    stats = host.front_stats()
    tensors = {number: live_tensors(host.inspect(number)) for number, _ in generations}
    pids = host.processes.pids
    with explained(_SERVING):
        processes = {role: capture_process(pid, role, tracker=trackers.get(role)) for role, pid in pids.items()}
    snapshot = HostSnapshot(
        taken_unix_ns=time.time_ns(),
        generation=serving,
        generations=tuple(
            GenerationState(number, digest, {name: found.state for name, found in tensors[number].items()})
            for number, digest in generations
        ),
        processes=processes,
        counters={"requests_completed": stats["requests_completed"], "tokens": stats["tokens_out"]},
    )
    return Captured(snapshot, pids.get("engine", 0), tensors)


def keep(
    context: HostContext, captured: Captured, contents: Collection[int], *, label: str, transaction: str = ""
) -> Stored:
    """Store a snapshot with the bytes of all tensors of the generations ``contents``.

    Raises:
        PatchctlError: ``snapshot.disk_full``, ``snapshot.quota``, ``snapshot.tensor_changed``, ``snapshot.failed``.
    """
    history = context.journal.history(_PINNED_TRANSACTIONS)
    pinned = {record.id for record in history} | {transaction}
    with explained(_SERVING):
        sources = _sources(captured, contents)
        return context.snapshots.add(captured.snapshot, sources, label=label, transaction=transaction, pinned=pinned)


def _sources(captured: Captured, contents: Collection[int]) -> Iterator[TensorSource]:
    reader = ContentReader(captured.engine_pid)

    def source(generation: int, name: str, address: int, found: LiveTensor) -> TensorSource:
        size_bytes = found.size_bytes
        read = partial(reader.read, address, size_bytes)
        return TensorSource(generation, name, address, found.state.digest, size_bytes, read)

    for generation in sorted(contents):
        for name, found in captured.tensors[generation].items():
            if found.address is not None and not found.state.alias:
                yield source(generation, name, found.address, found)


def live_tensors(found: Mapping[str, Any]) -> dict[str, LiveTensor]:
    """Inspect's reply; an alias takes the state of the tensor whose storage it shares."""
    tensors = {}
    for name, entry in found.items():
        alias = entry.get("alias_of", "")
        source = found[alias] if alias else entry
        chunks = bytes.fromhex(source["digest"])
        state = TensorState(
            whole_digest(chunks),
            source["dtype"],
            tuple(source["shape"]),
            alias,
            chunks=chunks,
            derived=source["derived"],
        )
        tensors[name] = LiveTensor(state, source["address"], source["nbytes"])
    return tensors
