"""Two builds → one patch file. The same inputs give the same bytes on any machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.build import BuildInvalidError, BuildManifest, verify_build
from patchctl.atomic import fsync_dir
from patchctl.bundle.actions import Actions, choose_actions
from patchctl.bundle.config import Constraints, Declared, PatchConfig, Put, TensorDelta
from patchctl.bundle.declaration import Undeclared, changed_files, changed_tensors, undeclared
from patchctl.bundle.decode import decode_config
from patchctl.bundle.layout import Source, write_layout
from patchctl.bundle.manifest import EMPTY_LAYER, encode_index, encode_manifest, layers
from patchctl.bundle.progress import Progress, silent
from patchctl.bundle.ranges import read_range
from patchctl.bundle.read import PatchFile
from patchctl.bundle.tensor_files import read_header
from patchctl.errors import ExitCode, PatchctlError
from patchctl.store.files import reading


@dataclass(frozen=True, slots=True)
class PatchMeta:
    """What the author says beside the declaration. Times are seconds since the Unix epoch."""

    patch_id: str
    channel: str
    sequence: int
    created_unix: int
    expires_unix: int
    author: str
    device_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PatchInfo:
    """A composed patch.

    Attributes:
        manifest_digest: hex sha256 of the OCI manifest: the subject to sign.
        build_size_bytes: what the target build occupies, to compare ``size_bytes`` with.
        actions: how many files are ``keep``, ``put``, ``tensor-delta`` and ``removed``.
        undeclared: changes that no declaration covers; the gate will see the same.
    """

    path: Path
    manifest_digest: str
    size_bytes: int
    build_size_bytes: int
    actions: Mapping[str, int]
    changed_files: tuple[str, ...]
    changed_tensors: tuple[str, ...]
    undeclared: Undeclared


def compose(
    base: Path, target: Path, out: Path, meta: PatchMeta, declared: Declared, *, progress: Progress | None = None
) -> PatchInfo:
    """Write the patch file that turns build ``base`` into build ``target``.

    The file is written aside, read back as a host would read it, synced and renamed to ``out``.

    Raises:
        PatchctlError: ``build.invalid`` (a folder is not a sound build), ``patch.unbuildable`` (the
            result would break a rule of the format), ``patch.source_changed`` (a build was altered
            meanwhile), ``patch.write_failed``.
    """
    report = progress or silent
    old, new = _verified(base, report), _verified(target, report)
    try:
        actions = choose_actions(base, old, target, new, report)
        config = _config(old, new, actions, meta, declared)
        blobs, index = _blobs(config, target)
        report("write", str(out))
        return _publish(out, index, blobs)
    except OSError as error:
        raise PatchctlError(
            code="patch.write_failed", what="The patch file was not written.", why=str(error)
        ) from error


def _verified(folder: Path, report: Progress) -> BuildManifest:
    report("verify", str(folder))
    try:
        return verify_build(folder)
    except (BuildInvalidError, OSError) as error:
        raise PatchctlError(
            code="build.invalid",
            what=f"{folder} is not a sound build.",
            why=str(error),
            exit_code=ExitCode.SIGNATURE,
        ) from error


def _config(
    old: BuildManifest, new: BuildManifest, actions: Actions, meta: PatchMeta, declared: Declared
) -> PatchConfig:
    config = PatchConfig(
        patch_id=meta.patch_id,
        channel=meta.channel,
        sequence=meta.sequence,
        created_unix=meta.created_unix,
        expires_unix=meta.expires_unix,
        author=meta.author,
        engine_kind=new.engine_kind,
        constraints=Constraints(device_kinds=meta.device_kinds),
        base_digest=old.digest,
        target_digest=new.digest,
        target_manifest=new,
        files=actions.files,
        removed=actions.removed,
        tensor_pack=actions.tensor_pack,
        declared=declared,
    )
    try:
        # msgspec checks values when it decodes, not when it constructs; every refusal is a ValueError.
        return decode_config(config.encode())
    except ValueError as error:
        raise PatchctlError(
            code="patch.unbuildable",
            what="The patch file was not written.",
            why=str(error),
            exit_code=ExitCode.USAGE,
        ) from error


def _blobs(config: PatchConfig, target: Path) -> tuple[dict[str, Source], bytes]:
    """All blobs by hex sha256, and ``index.json``."""
    config_bytes = config.encode()
    manifest = encode_manifest(config, config_bytes)
    blobs = {layer.sha256: _bytes_source(EMPTY_LAYER) for layer in layers(config)}
    for raw in (config_bytes, manifest):
        blobs[hashlib.sha256(raw).hexdigest()] = _bytes_source(raw)
    for action in config.files:
        if isinstance(action, Put):
            blobs[action.sha256] = Source(action.size_bytes, _file_reader(target / action.path, action.size_bytes))
    if config.tensor_pack:
        pack = config.tensor_pack
        reader = _pack_reader(target, config.tensor_deltas)
        blobs[pack.digest.removeprefix("sha256:")] = Source(pack.size_bytes, reader)
    return blobs, encode_index(manifest)


def _bytes_source(raw: bytes) -> Source:
    return Source(len(raw), lambda: (raw,))


def _file_reader(path: Path, size_bytes: int) -> Callable[[], Iterator[bytes]]:
    def blocks() -> Iterator[bytes]:
        with reading(path) as fd:
            yield from read_range(fd, 0, size_bytes)

    return blocks


def _pack_reader(target: Path, deltas: tuple[TensorDelta, ...]) -> Callable[[], Iterator[bytes]]:
    def blocks() -> Iterator[bytes]:
        for action in deltas:
            with reading(target / action.path) as fd:
                entries = {entry.name: entry for entry in read_header(fd).tensors}
                for change in action.tensors:
                    yield from read_range(fd, entries[change.name].offset, change.size_bytes)

    return blocks


def _publish(out: Path, index: bytes, blobs: Mapping[str, Source]) -> PatchInfo:
    fd, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    aside = Path(name)
    try:
        with os.fdopen(fd, "wb") as stream:
            os.fchmod(stream.fileno(), 0o644)
            write_layout(stream, index, blobs)
            stream.flush()
            os.fsync(stream.fileno())
        # Never publish what a host would refuse.
        with PatchFile.open(aside) as patch:
            info = _info(out, patch)
        aside.rename(out)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_dir(out.parent)
    return info


def _info(path: Path, patch: PatchFile) -> PatchInfo:
    config = patch.config
    kinds = Counter(action.__struct_config__.tag for action in config.files)
    counts = {kind: kinds[kind] for kind in ("keep", "put", "tensor-delta")}
    return PatchInfo(
        path=path,
        manifest_digest=patch.manifest_digest,
        size_bytes=patch.size_bytes,
        build_size_bytes=sum(action.size_bytes for action in config.files) + len(config.target_manifest.encode()),
        actions={**counts, "removed": len(config.removed)},
        changed_files=changed_files(config),
        changed_tensors=changed_tensors(config),
        undeclared=undeclared(config),
    )
