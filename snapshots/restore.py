"""Decides whether stored tensors may be written back into the engine that runs now. Pure.

Only named tensors and buffers are ever restored. Heap, stack and globals are evidence: what they hold refers to
threads, locks and descriptors of the moment they were read, and writing them back kills the process.

The engine must be the very process the snapshot was taken of: another one has loaded its tensors anew, verified, and
elsewhere. And the stored bytes must be those of the build as it was committed: a snapshot can hold a corruption too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from snapshots.findings import matches
from snapshots.model import GenerationState, TensorState
from snapshots.store.manifest import Blob, Manifest

# How people name what is not a tensor: [heap], stack, 7f00-7f10, /usr/lib/x.so.
_EVIDENCE = re.compile(
    r"(\[?(heap|stack|globals?|data|bss|anon.*|vvar|vdso)\]?|(0x)?[0-9a-f]+-(0x)?[0-9a-f]+|/.*)\Z", re.IGNORECASE
)


class RestoreRefusedError(Exception):
    """Nothing was written.

    Attributes:
        code: stable dotted identifier.
        why: one sentence.
        action: what to do instead.
    """

    def __init__(self, code: str, why: str, action: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why
        self.action = action


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor as the engine has it now. ``address`` is None where it lies on a device."""

    state: TensorState
    address: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """The engine process as it is now, and one of its generations."""

    pid: int
    start_ticks: int
    generation: int
    build_digest: str
    tensors: Mapping[str, LiveTensor]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor to write: what it must be, where it must lie, and which stored bytes it gets."""

    name: str
    state: TensorState
    address: int
    content: Blob


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What to write. ``unchanged`` hold the stored bytes already."""

    generation: int
    build_digest: str
    tensors: tuple[PlannedTensor, ...]
    unchanged: tuple[str, ...]


def plan_restore(
    manifest: Manifest, names: Sequence[str], live: LiveEngine, committed: Mapping[str, str] | None
) -> RestorePlan:
    """Check everything that can be checked before the engine is asked.

    Args:
        manifest: of the snapshot.
        names: tensors or globs of them.
        live: the engine now, with the generation to restore.
        committed: tensor → digest as recorded when the build was committed; None when nothing was recorded.

    Raises:
        RestoreRefusedError: ``restore.evidence_only``, ``restore.other_process``, ``restore.other_build``,
            ``restore.no_such_tensor``, ``restore.not_stored``, ``restore.mismatch``, ``restore.moved``,
            ``restore.on_device``, ``restore.not_as_committed``.
    """
    known = {tensor for state in manifest.snapshot.generations for tensor in state.tensors}
    for name in names:
        if name not in known and _EVIDENCE.match(name):
            raise RestoreRefusedError(
                "restore.evidence_only",
                f"{name} is evidence only: heap, stack and globals refer to threads, locks and descriptors of the "
                "moment they were read, and writing them back kills the process",
                "restore named tensors; for everything else patchctl rollback, which exchanges generations",
            )
    stored = _stored_state(manifest, live)
    planned, unchanged = [], []
    for name in _named(stored, names):
        one = _plan_tensor(manifest, name, stored.tensors[name], live, committed)
        if live.tensors[name].state.digest == one.state.digest:
            unchanged.append(name)
        else:
            planned.append(one)
    return RestorePlan(live.generation, live.build_digest, tuple(planned), tuple(unchanged))


def _stored_state(manifest: Manifest, live: LiveEngine) -> GenerationState:
    """The generation in the snapshot, if it is of this very process and build."""
    process = manifest.snapshot.processes.get("engine")
    if process is None or (process.pid, process.start_ticks) != (live.pid, live.start_ticks):
        then = "no engine process" if process is None else f"process {process.pid} (started at {process.start_ticks})"
        raise RestoreRefusedError(
            "restore.other_process",
            f"the snapshot is of {then}, the engine is process {live.pid} (started at {live.start_ticks})",
            "an engine that was started since has loaded its tensors anew: patchctl snapshot take, then diff",
        )
    stored = manifest.snapshot.state_of(live.generation)
    if stored is None or stored.build_digest != live.build_digest:
        then = "does not hold it" if stored is None else f"holds build {stored.build_digest} under that number"
        raise RestoreRefusedError(
            "restore.other_build",
            f"generation {live.generation} is build {live.build_digest}; the snapshot {then}",
            f"patchctl snapshot show {manifest.id}",
        )
    return stored


def _named(stored: GenerationState, names: Sequence[str]) -> Iterator[str]:
    """Tensors with storage of their own that any of the names fits; an alias stands for what it shares."""
    for name in names:
        if not any(matches(known, (name,)) for known in stored.tensors):
            raise RestoreRefusedError(
                "restore.no_such_tensor", f"the snapshot has no tensor {name}", "patchctl snapshot show -o json"
            )
    found = [known for known in stored.tensors if matches(known, tuple(names))]
    return iter(dict.fromkeys(stored.tensors[name].alias or name for name in found))


def _plan_tensor(
    manifest: Manifest, name: str, stored: TensorState, live: LiveEngine, committed: Mapping[str, str] | None
) -> PlannedTensor:
    content = manifest.content(live.generation, name)
    now = live.tensors.get(name)
    if content is None:
        why = f"the snapshot knows the digest of {name}, but not its bytes"
        raise RestoreRefusedError("restore.not_stored", why, "choose a snapshot taken with patchctl snapshot take")
    if now is None or (now.state.dtype, now.state.shape) != (stored.dtype, stored.shape):
        found = "gone" if now is None else f"{now.state.dtype}{list(now.state.shape)}"
        why = f"{name} was {stored.dtype}{list(stored.shape)} and is {found}"
        raise RestoreRefusedError("restore.mismatch", why, "patchctl rollback")
    if now.address is None:
        why = f"{name} lies on a device; only tensors in host memory are restored"
        raise RestoreRefusedError("restore.on_device", why, "patchctl rollback")
    if now.address != content.address:
        why = f"{name} lay at {content.address:#x} and lies at {now.address:#x}: the mapping has moved"
        raise RestoreRefusedError("restore.moved", why, "take a new snapshot once the tensor is right again")
    if committed is not None and committed.get(name) != stored.digest:
        raise RestoreRefusedError(
            "restore.not_as_committed",
            f"the snapshot holds other bytes of {name} than the build had when it was committed",
            "choose an older snapshot: patchctl snapshot list",
        )
    return PlannedTensor(name, stored, now.address, content.content)
