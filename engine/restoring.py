"""Puts stored bytes back into named tensors of a resident generation, in place, between two steps.

Everything is checked before the first byte is written, the present bytes are kept, and what was written is hashed
again before the next step may read it; on any failure the kept bytes go back. Tensors that generations share are the
same memory: whoever computes with it gets the restored bytes, and KV that the bytes before made is dropped for all of
them, so that running sequences compute it again.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.generation import Generation
from engine.inspection import DigestTensors, as_bytes, dtype_name
from engine.loop import ServeLoop
from engine.wire import Reply, Restore, RestoreTensor

_log = logging.getLogger(__name__)


class RestoreRefusedError(EngineError):
    """Nothing was changed; ``code`` says why."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class RestoreIncompleteError(EngineError):
    """A tensor holds neither its old bytes nor the stored ones: the process must be replaced."""

    code = "restore_incomplete"


@dataclass(frozen=True, slots=True)
class _Write:
    """One tensor to restore: uint8 ``[n]`` each; ``kept`` is what it holds now."""

    name: str
    target: torch.Tensor
    source: torch.Tensor
    kept: torch.Tensor
    digest: str


class Restorer:
    """Carries out :class:`Restore`: prepares in the caller's thread, writes in the serve loop's."""

    def __init__(self, loop: ServeLoop, digest_tensors: DigestTensors) -> None:
        self._loop = loop
        self._digest_tensors = digest_tensors

    def restore(self, generation: Generation, message: Restore, resident: Iterable[Generation]) -> Reply:
        """Restore tensors of ``generation``; those that hold the wanted bytes already are left alone.

        Args:
            generation: resident, not being freed.
            message: what to write.
            resident: every resident generation.

        Returns:
            The names written, how many held their bytes already, and which generations lost their KV.

        Raises:
            RestoreRefusedError: ``restore_refused`` for another build, an unknown tensor, another shape, dtype or
                address, or damaged stored bytes; ``restore_undone`` when writing failed. Nothing is changed.
            RestoreIncompleteError: writing failed, and so did the way back.
        """
        if message.digest != generation.digest:
            raise _refused(f"generation {generation.number} is build {generation.digest}, not {message.digest}")
        targets = {entry.name: _target(generation, entry) for entry in message.tensors}
        present = self._digest_tensors({name: as_bytes(target) for name, target in targets.items()})
        wanted = [entry for entry in message.tensors if present[entry.name] != entry.digest]
        affected: list[Generation] = []
        if wanted:
            content = _content(Path(message.path))
            affected = _affected([targets[entry.name] for entry in wanted], resident)
            self._write([self._prepare(entry, targets[entry.name], content) for entry in wanted], affected)
        return Reply(
            data={
                "restored": [entry.name for entry in wanted],
                "unchanged": len(message.tensors) - len(wanted),
                "kv_dropped": sorted(one.number for one in affected),
            }
        )

    def _prepare(self, entry: RestoreTensor, target: torch.Tensor, content: NDArray[np.uint8]) -> _Write:
        source = content[entry.offset : entry.offset + target.numel()]
        if len(source) != target.numel() or self._digest_tensors({entry.name: source})[entry.name] != entry.digest:
            raise _refused(f"{entry.name}: the stored bytes are not those that were asked for")
        return _Write(entry.name, target, torch.from_numpy(source), target.clone(), entry.digest)

    def _write(self, writes: Sequence[_Write], affected: Sequence[Generation]) -> None:
        """Write between two steps; the loop waits meanwhile for one copy and one hash of what is written."""
        failures: list[Exception] = []

        def write() -> None:
            try:
                self._write_checked(writes)
            except Exception as error:
                # The loop's own thread: whatever goes wrong is the reply, and serving goes on.
                failures.append(error)
                return
            for generation in affected:
                self._loop.schedule.drop(generation.number)
                generation.space.pool.forget(generation.number)

        self._loop.call(write).result()
        if failures:
            raise failures[0]

    def _write_checked(self, writes: Sequence[_Write]) -> None:
        try:
            for one in writes:
                one.target.copy_(one.source)
            found = self._digest_tensors({one.name: as_bytes(one.target) for one in writes})
            wrong = next((one.name for one in writes if found[one.name] != one.digest), None)
        except Exception as error:
            _undo(writes, error)
            raise RestoreRefusedError("restore_undone", f"writing failed and was undone: {error}") from error
        if wrong is not None:
            why = f"{wrong} did not hold what was written"
            _undo(writes, why)
            raise RestoreRefusedError("restore_undone", f"{why}; undone")


def _refused(why: str) -> RestoreRefusedError:
    return RestoreRefusedError("restore_refused", why)


def _target(generation: Generation, entry: RestoreTensor) -> torch.Tensor:
    """The bytes of the tensor that ``entry`` names, after every check that needs no reading."""
    tensor = generation.tensors.get(entry.name)
    if tensor is None:
        raise _refused(f"generation {generation.number} has no tensor {entry.name} of its own")
    if (dtype_name(tensor), tuple(tensor.shape)) != (entry.dtype, entry.shape):
        found, asked = f"{dtype_name(tensor)}{list(tensor.shape)}", f"{entry.dtype}{list(entry.shape)}"
        raise _refused(f"{entry.name} is {found}, not {asked}")
    if tensor.data_ptr() != entry.address:
        raise _refused(f"{entry.name} has moved in memory since the snapshot")
    return tensor.view(-1).view(torch.uint8)


def _content(path: Path) -> NDArray[np.uint8]:
    """The file with the stored bytes, mapped copy-on-write: torch wants memory that it could write."""
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise _refused(f"the stored bytes cannot be read: {error}") from error


def _affected(targets: Sequence[torch.Tensor], resident: Iterable[Generation]) -> list[Generation]:
    """Generations that compute, or in copy mode would compute, with any of the tensors' memory."""
    written = {target.untyped_storage().data_ptr() for target in targets}
    users = [one for one in resident if any(t.untyped_storage().data_ptr() in written for t in one.tensors.values())]
    sets = {id(one.graphs) for one in users}
    return [one for one in resident if id(one.graphs) in sets]


def _undo(writes: Sequence[_Write], cause: Exception | str) -> None:
    """Give every tensor its bytes back; one that cannot be given back does not stop the others."""
    lost = []
    for one in writes:
        try:
            one.target.copy_(one.kept)
            if not torch.equal(one.target, one.kept):
                lost.append(one.name)
        except Exception:
            _log.exception("tensor %s was not given its bytes back", one.name)
            lost.append(one.name)
    if lost:
        raise RestoreIncompleteError(f"{cause}; then {lost[0]} could not be given its bytes back")
