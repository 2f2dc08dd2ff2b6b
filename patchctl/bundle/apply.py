"""Patch file + base build → target build in the store, or nothing at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.build import (
    MANIFEST_NAME,
    BuildFile,
    BuildInvalidError,
    BuildManifest,
    read_manifest,
    sha256_file,
    verify_build,
)
from patchctl.bundle.config import Action, Keep, PatchConfig, Put, TensorChange, TensorDelta
from patchctl.bundle.layout import Span
from patchctl.bundle.progress import Progress, silent
from patchctl.bundle.ranges import read_range
from patchctl.bundle.read import PatchFile
from patchctl.bundle.refusal import damaged, wrong_base
from patchctl.bundle.safetensors import SafetensorsInvalidError, TensorEntry
from patchctl.bundle.tensor_files import read_header
from patchctl.errors import PatchctlError
from patchctl.store import BuildStore
from patchctl.store.failure import build_damaged, explained, require_space
from patchctl.store.files import copy_file, copy_range, creating, link_or_copy, pwrite_all, reading, write_file


def apply(patch: PatchFile, base_folder: Path, store: BuildStore, *, progress: Progress | None = None) -> Path:
    """Make the target build in the store and return its folder.

    Unchanged files are hard-linked when the base is a build of the same store (whose files are
    read-only), else copied. Every file is hashed as it lies on disk before the folder gets its name.
    A target that is already there is verified and returned.

    Args:
        patch: the open patch file; its blobs are hashed again while they are used.
        base_folder: the build the patch starts from.
        store: where the target goes.
        progress: called at each step; raising from it aborts, and nothing is left behind.

    Raises:
        PatchctlError: ``patch.wrong_base``; ``patch.damaged`` (the patch contradicts the base, or was
            altered since it was opened); ``store.build_damaged`` (the base or a stored target was
            altered); ``store.disk_short``; ``store.io_failed``.
    """
    report = progress or silent
    config = patch.config
    with explained():
        _check_base(config, base_folder)
        if store.has(config.target_digest):
            store.verify(config.target_digest)
            return store.path(config.target_digest)
        link = store.path(config.base_digest).resolve() == base_folder.resolve()
        _require_space(config, store, link=link)
        with store.aside() as aside:
            report("aside", str(aside))
            for action in config.files:
                report("place", action.path)
                _place(action, patch, base_folder, aside, link=link)
            write_file(aside / MANIFEST_NAME, config.target_manifest.encode())
            report("verify", config.target_digest)
            _verify(config, aside)
            report("install", config.target_digest)
            final = store.install(aside, config.target_digest)
            report("installed", config.target_digest)
    return final


def _check_base(config: PatchConfig, base_folder: Path) -> None:
    """Everything that can be refused before the first write, except for the content of kept files."""
    try:
        base = read_manifest(base_folder)
    except BuildInvalidError as error:
        raise build_damaged(f"base: {error}") from error
    if base.digest != config.base_digest:
        raise wrong_base(config.base_digest, base.digest)
    _check_actions(config, base)
    for action in config.tensor_deltas:
        with reading(base_folder / action.path) as fd:
            _entries(action, fd)


def _check_actions(config: PatchConfig, base: BuildManifest) -> None:
    """What the patch says about the base's files must be what the base says."""
    before: dict[str, BuildFile] = {entry.path: entry for entry in base.files}
    if tuple(sorted(set(before) - {action.path for action in config.files})) != config.removed:
        raise damaged("the removed files are not those that base and target differ by")
    for action in config.files:
        entry = before.get(action.path)
        old_sha256 = entry.sha256 if entry else None
        match action:
            case Put():
                agrees = action.old_sha256 == old_sha256
            case Keep():
                agrees = entry is not None and (entry.sha256, entry.size_bytes) == (action.sha256, action.size_bytes)
            case TensorDelta():
                agrees = old_sha256 == action.old_sha256 and entry is not None and entry.size_bytes == action.size_bytes
        if not agrees:
            raise damaged(f"{action.path}: the patch and its base disagree about the old file")


def _entries(action: TensorDelta, fd: int) -> dict[str, TensorEntry]:
    """The replaced tensors' places in the base file, from the base file's own header."""
    try:
        entries = {entry.name: entry for entry in read_header(fd).tensors}
    except SafetensorsInvalidError as error:
        raise damaged(f"{action.path}: the base file is no safetensors file: {error}") from error
    for change in action.tensors:
        entry = entries.get(change.name)
        if entry is None or (entry.dtype, entry.shape) != (change.dtype, change.shape):
            raise damaged(f"{action.path}: the base has no tensor {change.name} of that dtype and shape")
    return entries


def _require_space(config: PatchConfig, store: BuildStore, *, link: bool) -> None:
    written = [action for action in config.files if not (link and isinstance(action, Keep))]
    require_space(store.builds, sum(action.size_bytes for action in written), len(config.files) + 1)


def _place(action: Action, patch: PatchFile, base: Path, aside: Path, *, link: bool) -> None:
    target = aside / action.path
    match action:
        case Keep():
            (link_or_copy if link else copy_file)(base / action.path, target)
        case Put():
            span = patch.blobs[action.sha256]
            with creating(target) as fd:
                copy_range(patch.fd, span.offset, fd, span.size_bytes)
        case TensorDelta():
            with reading(base / action.path) as base_fd, creating(target) as fd:
                copy_range(base_fd, 0, fd, action.size_bytes)
                entries = _entries(action, base_fd)
                for change in action.tensors:
                    _replace(fd, entries[change.name], change, patch)


def _replace(fd: int, entry: TensorEntry, change: TensorChange, patch: PatchFile) -> None:
    digest = hashlib.sha256()
    pack = _pack_span(patch)
    offset = entry.offset
    for block in read_range(patch.fd, pack.offset + change.pack_offset, change.size_bytes):
        digest.update(block)
        offset += pwrite_all(fd, block, offset)
    if digest.hexdigest() != change.sha256:
        raise damaged(f"tensor {change.name} does not match its digest")


def _pack_span(patch: PatchFile) -> Span:
    pack = patch.config.tensor_pack
    if pack is None:
        raise damaged("there is no tensor pack")
    return patch.blobs[pack.digest.removeprefix("sha256:")]


def _verify(config: PatchConfig, aside: Path) -> None:
    """Hash every file as written; file set, contents and manifest must be the target's."""
    try:
        verify_build(aside, config.target_digest)
    except BuildInvalidError as error:
        raise _blame(config, aside, error) from error


def _blame(config: PatchConfig, aside: Path, error: BuildInvalidError) -> PatchctlError:
    """Whose fault a wrong file is: a stored file came from the patch alone, any other also from the base."""
    for action in config.files:
        if isinstance(action, Put) and sha256_file(aside / action.path) != action.sha256:
            return damaged(f"{action.path} changed after the patch file was checked")
    return build_damaged(f"base {config.base_digest}, or what the patch makes of it: {error}")
