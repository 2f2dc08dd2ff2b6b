"""Weights mapped from the build's safetensors files.

A tensor stored in the compute dtype is a view of a private file mapping: staging copies nothing, and
several generations share the page cache. Other dtypes are converted, one copy each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.build import BuildManifest
from engine.errors import LoadError

INDEX_NAME = "model.safetensors.index.json"
_STORED_DTYPES = {"F32", "BF16", "F16"}
_PAGE_BYTES = 4096


def weights_digest(manifest: BuildManifest) -> str:
    """``sha256:<hex>`` over the digests of all weight files, whatever else the build changes."""
    lines = "".join(f"{entry.sha256} {entry.path}\n" for entry in manifest.weight_files)
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def _index(folder: Path, manifest: BuildManifest) -> dict[str, str] | None:
    """Tensor name → file name of a sharded build, or None without an index."""
    if manifest.file(INDEX_NAME) is None:
        return None
    try:
        weight_map: Any = json.loads((folder / INDEX_NAME).read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{INDEX_NAME} does not parse: {error!r}") from error
    if not isinstance(weight_map, dict):
        raise LoadError(f"{INDEX_NAME}: weight_map is not an object")
    return weight_map


def _map_file(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {}
    with safe_open(path, framework="pt", device="cpu") as stored:
        for name in stored.keys():  # noqa: SIM118 - not a mapping
            described = stored.get_slice(name)
            shape, stored_dtype = tuple(described.get_shape()), described.get_dtype()
            if name not in shapes:
                raise LoadError(f"{path.name}: unexpected tensor {name}")
            if shape != shapes[name]:
                raise LoadError(f"{path.name}: {name} has shape {list(shape)}, expected {list(shapes[name])}")
            if stored_dtype not in _STORED_DTYPES:
                raise LoadError(f"{path.name}: {name} is stored as {stored_dtype}, not one of {sorted(_STORED_DTYPES)}")
            tensors[name] = stored.get_tensor(name).to(dtype)
    return tensors


def load_weights(
    folder: Path, manifest: BuildManifest, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Map every tensor named in ``shapes``, on the CPU, in ``dtype``.

    Raises:
        LoadError: a tensor is missing, extra, repeated, mis-shaped or in a dtype we do not read, a file is
            damaged, or the shard index disagrees with the files.
    """
    index = _index(folder, manifest)
    tensors: dict[str, torch.Tensor] = {}
    for entry in manifest.weight_files:
        try:
            mapped = _map_file(folder / entry.path, shapes, dtype)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{entry.path}: {error}") from error
        if repeated := tensors.keys() & mapped.keys():
            raise LoadError(f"{entry.path}: {min(repeated)} is also in another file")
        if index is not None and (moved := [name for name in mapped if index.get(name) != entry.path]):
            raise LoadError(f"{INDEX_NAME} places {moved[0]} elsewhere than {entry.path}")
        tensors |= mapped
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise LoadError(f"{len(missing)} tensors are missing, first {missing[0]}")
    return tensors


def page_in(tensor: torch.Tensor) -> None:
    """Read one byte of every page, so that the first step does not wait for the disk."""
    tensor.view(-1).view(torch.uint8)[::_PAGE_BYTES].sum()
