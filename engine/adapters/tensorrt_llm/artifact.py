"""A build folder of kind ``tensorrt_llm`` on disk: what to load, and how much of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.adapters.tensorrt_llm.engine_set import (
    CONFIG_BYTES_MAX,
    CONFIG_NAME,
    Checkpoint,
    EngineSet,
    EngineSetInvalidError,
    check_files,
)
from engine.build import BuildInvalidError, BuildManifest, read_manifest, seal_build
from engine.errors import LoadError

_LENGTH_BYTES = 8
# The safetensors library's own limit for a header.
_HEADER_BYTES_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class Artifact:
    """A build that TensorRT-LLM can load."""

    folder: Path
    manifest: BuildManifest
    files: EngineSet | Checkpoint

    def rank_bytes(self, ranks: int) -> tuple[int, ...]:
        """Bytes of weights that each rank loads; a checkpoint is split over ``ranks``."""
        sizes = {entry.path: entry.size_bytes for entry in self.manifest.files}
        if isinstance(self.files, Checkpoint):
            return (-(-sum(sizes[name] for name in self.files.weights) // ranks),) * ranks
        managed = self.files.managed_weights or ("",) * self.files.world_size
        return tuple(
            sizes[engine] + sizes.get(extra, 0) for engine, extra in zip(self.files.engines, managed, strict=True)
        )


def read_artifact(folder: Path) -> Artifact:
    """Read the manifest and ``config.json``; the files were hashed by whoever verified the build.

    Raises:
        LoadError: not a build of this kind, or not a whole one.
    """
    try:
        manifest = read_manifest(folder)
        if manifest.engine_kind != "tensorrt_llm":
            raise LoadError(f"the build is for engine {manifest.engine_kind}, not tensorrt_llm")
        config = _read(folder / CONFIG_NAME, CONFIG_BYTES_MAX + 1)
        return Artifact(folder, manifest, check_files((entry.path for entry in manifest.files), config))
    except (BuildInvalidError, EngineSetInvalidError, OSError) as error:
        raise LoadError(str(error)) from error


def seal_engine_build(folder: Path, *, name: str, version: str, request_path: str) -> BuildManifest:
    """Make a build of a folder that ``trtllm-build`` or a model download left, and a request-path module in it.

    Raises:
        BuildInvalidError: not a whole engine set or checkpoint, or as :func:`engine.build.seal_build`.
    """
    try:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        found = check_files(names, _read(folder / CONFIG_NAME, CONFIG_BYTES_MAX + 1))
    except (EngineSetInvalidError, OSError) as error:
        raise BuildInvalidError(str(error)) from error
    return seal_build(
        folder,
        name=name,
        version=version,
        model=found.model,
        request_path=request_path,
        engine_kind="tensorrt_llm",
    )


def not_interchangeable(old: Artifact, new: Artifact) -> str:
    """Why weights of ``new`` cannot be written over those of ``old``, or "".

    TensorRT-LLM loads partial weights without a word, so a missing tensor would leave a mixture of both models.
    """
    if not isinstance(old.files, Checkpoint) or not isinstance(new.files, Checkpoint):
        return "a TensorRT engine's weights are part of its plan"
    if old.files.config != new.files.config:
        return f"{CONFIG_NAME} differs"
    before, after = (_tensors(artifact) for artifact in (old, new))
    if odd := sorted(before.keys() ^ after.keys()):
        return f"tensor {odd[0]} is only in the {'new' if odd[0] in after else 'old'} build"
    if odd := sorted(name for name, kind in before.items() if after[name] != kind):
        return f"tensor {odd[0]} is {after[odd[0]]}, was {before[odd[0]]}"
    return ""


def _tensors(artifact: Artifact) -> dict[str, str]:
    """Tensor name → dtype and shape, over all files.

    Raises:
        LoadError: a header does not parse.
    """
    assert isinstance(artifact.files, Checkpoint)
    tensors: dict[str, str] = {}
    for name in artifact.files.weights:
        try:
            with (artifact.folder / name).open("rb") as stream:
                length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
                if length > _HEADER_BYTES_MAX:
                    raise LoadError(f"{name}: header of {length} bytes")
                header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors |= {tensor: f"{entry['dtype']} {entry['shape']}" for tensor, entry in header.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LoadError(f"{name}: header does not parse: {error!r}") from error
    return tensors


def _read(path: Path, size: int) -> bytes:
    with path.open("rb") as stream:
        return stream.read(size)
