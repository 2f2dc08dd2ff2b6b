"""The demo's three builds, made from one real model."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from engine.build import BuildManifest, RuntimeOptions, seal_build
from engine.models.folder import ModelRefusedError, read_model_folder
from patchctl.errors import ExitCode, PatchctlError

REQUEST_PATH = "request_path.py"
# A middle layer: changing it changes answers without breaking them, the kind of slip nobody sees.
_TENSOR = "model.layers.{layer}.mlp.down_proj.weight"

# Graphs for one stream and for the demo's four. Each further size or context is captured beside live
# traffic when a patch is staged, about 1.5 s apiece on two busy cores.
_RUNTIME = RuntimeOptions(batch_sizes=(1, 4), contexts=(512,))


@dataclass(frozen=True, slots=True)
class Builds:
    """Folders and manifests by version, and the tensor that 1.0.2 changes without saying so."""

    folders: dict[str, Path]
    manifests: dict[str, BuildManifest]
    changed_tensor: str


def make_builds(model: Path, name: str, into: Path) -> Builds:
    """Build 1.0.0 (leaky writer), 1.0.1 (fixed writer) and 1.0.2 (fixed writer, one tensor altered).

    Raises:
        PatchctlError: ``demo.model_refused`` when ``model`` is no folder we can serve.
    """
    try:
        source = read_model_folder(model)
    except ModelRefusedError as error:
        raise PatchctlError(
            code="demo.model_refused",
            what=f"{model} cannot be served",
            why=str(error),
            exit_code=ExitCode.NOT_FOUND if not model.exists() else ExitCode.INCOMPATIBLE,
            next_command="patchctl demo, without --model, serves SmolLM2-135M-Instruct",
        ) from error
    folders = {version: into / version for version in ("1.0.0", "1.0.1", "1.0.2")}
    for version, folder in folders.items():
        folder.mkdir(parents=True)
        for file in source.files:
            _link_or_copy(model / file, folder / file, copy=version == "1.0.2" and file.endswith(".safetensors"))
        path = "1_0_0" if version == "1.0.0" else "1_0_1"
        code = files("patchctl.demo.paths").joinpath(f"request_path_{path}.py").read_bytes()
        (folder / REQUEST_PATH).write_bytes(code)
    tensor = _TENSOR.format(layer=source.config["num_hidden_layers"] // 2)
    _scale_tensor(folders["1.0.2"], source.files, tensor)
    manifests = {
        version: seal_build(
            folder, name=name, version=version, model=source.config, request_path=REQUEST_PATH, runtime=_RUNTIME
        )
        for version, folder in folders.items()
    }
    return Builds(folders, manifests, tensor)


def _link_or_copy(source: Path, target: Path, *, copy: bool) -> None:
    if not copy:
        try:
            os.link(source.resolve(), target)
        except OSError:
            copy = True
    if copy:
        shutil.copyfile(source, target)


def _scale_tensor(folder: Path, names: tuple[str, ...], tensor: str) -> None:
    """Multiply one float32 tensor by 1.01 in place: same file layout, other bytes."""
    import numpy as np

    from patchctl.bundle.tensor_files import read_header

    for name in names:
        if not name.endswith(".safetensors"):
            continue
        with (folder / name).open("r+b") as stream:
            entry = next((found for found in read_header(stream.fileno()).tensors if found.name == tensor), None)
            if entry is None:
                continue
            stream.seek(entry.offset)
            data = np.frombuffer(stream.read(entry.size_bytes), dtype=np.float32)
            stream.seek(entry.offset)
            stream.write((data * np.float32(1.01)).tobytes())
        return
    raise KeyError(tensor)
