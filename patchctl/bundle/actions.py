"""Choosing how each file of the target travels: not at all, as changed tensors, or whole."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from engine.build import BuildFile, BuildManifest
from patchctl.bundle.config import Action, Keep, Put, TensorChange, TensorDelta, TensorPack
from patchctl.bundle.progress import Progress
from patchctl.bundle.ranges import range_sha256, read_range
from patchctl.bundle.safetensors import Header, SafetensorsInvalidError, TensorEntry
from patchctl.bundle.tensor_files import changed_tensors, read_header
from patchctl.store.files import reading

# What one TensorChange adds to the config: two digests, a name and five numbers.
_CHANGE_BYTES = 400


@dataclass(frozen=True, slots=True)
class Actions:
    """The part of a config that follows from comparing two builds."""

    files: tuple[Action, ...]
    removed: tuple[str, ...]
    tensor_pack: TensorPack | None


class _Pack:
    """Offset and digest of the tensor pack while tensors are appended to it."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._digest = hashlib.sha256()

    def append(self, fd: int, entry: TensorEntry, old_sha256: str) -> TensorChange:
        own = hashlib.sha256()
        for block in read_range(fd, entry.offset, entry.size_bytes):
            own.update(block)
            self._digest.update(block)
        change = TensorChange(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            old_sha256=old_sha256,
            sha256=own.hexdigest(),
            pack_offset=self.size_bytes,
            size_bytes=entry.size_bytes,
        )
        self.size_bytes += entry.size_bytes
        return change

    def layer(self) -> TensorPack | None:
        if not self.size_bytes:
            return None
        return TensorPack(digest=f"sha256:{self._digest.hexdigest()}", size_bytes=self.size_bytes)


def choose_actions(base: Path, old: BuildManifest, target: Path, new: BuildManifest, progress: Progress) -> Actions:
    """Compare two verified builds file by file, and safetensors files tensor by tensor.

    Raises:
        OSError: a file cannot be read.
    """
    before = {entry.path: entry for entry in old.files}
    pack = _Pack()
    files: list[Action] = []
    for entry in new.files:
        progress("compare", entry.path)
        previous = before.pop(entry.path, None)
        if previous == entry:
            files.append(Keep(path=entry.path, sha256=entry.sha256, size_bytes=entry.size_bytes))
        else:
            delta = _tensor_delta(base, previous, target, entry, pack) if previous else None
            files.append(delta or _put(entry, previous))
    return Actions(files=tuple(files), removed=tuple(sorted(before)), tensor_pack=pack.layer())


def _put(entry: BuildFile, previous: BuildFile | None) -> Put:
    return Put(
        path=entry.path,
        sha256=entry.sha256,
        size_bytes=entry.size_bytes,
        layer=f"sha256:{entry.sha256}",
        old_sha256=previous.sha256 if previous else None,
    )


def _tensor_delta(base: Path, previous: BuildFile, target: Path, entry: BuildFile, pack: _Pack) -> TensorDelta | None:
    """The delta when both files are safetensors with the same header and fewer bytes travel, else None."""
    if not entry.path.endswith(".safetensors") or previous.size_bytes != entry.size_bytes:
        return None
    with reading(base / entry.path) as old_fd, reading(target / entry.path) as new_fd:
        header = _common_header(old_fd, new_fd)
        changed = changed_tensors(old_fd, new_fd, header) if header else ()
        travels_bytes = sum(tensor.size_bytes + _CHANGE_BYTES for tensor in changed)
        if not changed or travels_bytes >= entry.size_bytes or not all(tensor.name.isprintable() for tensor in changed):
            return None
        return TensorDelta(
            path=entry.path,
            old_sha256=previous.sha256,
            sha256=entry.sha256,
            size_bytes=entry.size_bytes,
            tensors=tuple(
                pack.append(new_fd, tensor, range_sha256(old_fd, tensor.offset, tensor.size_bytes))
                for tensor in changed
            ),
        )


def _common_header(old_fd: int, new_fd: int) -> Header | None:
    try:
        header = read_header(new_fd)
        return header if read_header(old_fd) == header else None
    except SafetensorsInvalidError:
        return None
