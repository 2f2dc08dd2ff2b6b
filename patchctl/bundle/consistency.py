"""The rules a parsed config must satisfy before anything is done with it. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from engine.build import MANIFEST_NAME, BuildInvalidError, decode_manifest, safe_path
from patchctl.bundle.config import Keep, PatchConfig, Put, TensorChange
from patchctl.bundle.safetensors import tensor_size_bytes

# NAME_MAX of Linux filesystems counts bytes of UTF-8, not characters.
PATH_BYTES_MAX = 255


class ConfigInvalidError(ValueError):
    """A patch config does not parse, is not canonical, or contradicts itself."""


def check_config(config: PatchConfig) -> None:
    """Refuse a config that contradicts itself.

    Raises:
        ConfigInvalidError: naming the first rule that is broken.
    """
    if config.created_unix >= config.expires_unix:
        raise ConfigInvalidError("the patch expires before it was created")
    if not config.author.isprintable():
        raise ConfigInvalidError("the author contains unprintable characters")
    _check_target(config)
    paths = [action.path for action in config.files]
    check_paths(paths)
    check_paths(config.removed)
    if not set(paths).isdisjoint(config.removed):
        raise ConfigInvalidError("a removed path is also a file of the target")
    for action in config.files:
        if isinstance(action, Put) and action.layer != f"sha256:{action.sha256}":
            raise ConfigInvalidError(f"{action.path}: the layer is not the file itself")
        if not isinstance(action, Keep) and action.old_sha256 == action.sha256:
            raise ConfigInvalidError(f"{action.path}: the file is replaced by itself")
    _check_pack(config)


def check_paths(paths: Sequence[str]) -> None:
    """Refuse paths that are unsafe, unsorted, repeated, or that some filesystem would confuse.

    Raises:
        ConfigInvalidError: naming the first path at fault.
    """
    if list(paths) != sorted(set(paths)):
        raise ConfigInvalidError("paths are not sorted, or one is listed twice")
    for path in paths:
        if not safe_path(path) or not path.isprintable() or path.casefold() == MANIFEST_NAME:
            raise ConfigInvalidError(f"unsafe path {path!r}")
        if len(path.encode()) > PATH_BYTES_MAX:
            raise ConfigInvalidError(f"path of more than {PATH_BYTES_MAX} bytes: {path!r}")
    folded = [_fold(path) for path in paths]
    if len(set(folded)) != len(folded):
        raise ConfigInvalidError("two paths differ only in case or Unicode form")
    clash = _folders(folded) & {*folded, MANIFEST_NAME}
    if clash:
        raise ConfigInvalidError(f"{min(clash)!r} is both a file and a folder")


def _fold(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _folders(paths: Iterable[str]) -> set[str]:
    folders = set()
    for path in paths:
        while "/" in path:
            path = path.rpartition("/")[0]  # noqa: PLW2901 - walks up to the root
            folders.add(path)
    return folders


def _check_target(config: PatchConfig) -> None:
    manifest = config.target_manifest
    try:
        decode_manifest(manifest.encode())
    except BuildInvalidError as error:
        raise ConfigInvalidError(f"the target manifest is invalid: {error}") from error
    if manifest.digest != config.target_digest:
        raise ConfigInvalidError(f"the target manifest is {manifest.digest}, not {config.target_digest}")
    if manifest.engine_kind != config.engine_kind:
        raise ConfigInvalidError(f"the target is for engine {manifest.engine_kind}, not {config.engine_kind}")
    made = [(action.path, action.sha256, action.size_bytes) for action in config.files]
    wanted = [(entry.path, entry.sha256, entry.size_bytes) for entry in manifest.files]
    if made != wanted:
        raise ConfigInvalidError("the actions do not produce the files of the target manifest")


def _check_pack(config: PatchConfig) -> None:
    """The replaced tensors tile the pack: no gap to hide bytes in, no overlap."""
    at = 0
    for action in config.tensor_deltas:
        if not action.tensors:
            raise ConfigInvalidError(f"{action.path}: tensor-delta without tensors")
        if len({change.name for change in action.tensors}) != len(action.tensors):
            raise ConfigInvalidError(f"{action.path}: a tensor is listed twice")
        for change in action.tensors:
            _check_tensor(action.path, change, at)
            at += change.size_bytes
        if sum(change.size_bytes for change in action.tensors) > action.size_bytes:
            raise ConfigInvalidError(f"{action.path}: more tensor bytes than the file has")
    pack_bytes = config.tensor_pack.size_bytes if config.tensor_pack else 0
    if at != pack_bytes or (config.tensor_pack is None) != (not config.tensor_deltas):
        raise ConfigInvalidError("the tensor pack does not hold exactly the replaced tensors")


def _check_tensor(path: str, change: TensorChange, at: int) -> None:
    if not change.name.isprintable():
        raise ConfigInvalidError(f"{path}: unprintable tensor name {change.name!r}")
    if tensor_size_bytes(change.dtype, change.shape) != change.size_bytes:
        raise ConfigInvalidError(f"{path}: {change.name} has not the size of its dtype and shape")
    if change.pack_offset != at:
        raise ConfigInvalidError(f"{path}: {change.name} leaves a gap or overlap in the tensor pack")
    if change.sha256 == change.old_sha256:
        raise ConfigInvalidError(f"{path}: {change.name} is replaced by itself")
