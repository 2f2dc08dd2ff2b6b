"""A build: the immutable, content-addressed folder an engine generation is loaded from.

``build.json`` is RFC 8785 canonical JSON, so the build digest is simply the sha256 of that file and
covers every other file through its sha256. Nothing in a build is imported or mapped before
:func:`verify_build` (or the stager, which hashes while it writes) has seen every byte.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec
import rfc8785

from engine.adapters.tensorrt_llm.engine_set import CONFIG_BYTES_MAX, CONFIG_NAME, EngineSetInvalidError, check_files

MANIFEST_NAME = "build.json"
# A manifest lists a few dozen files; 4 MiB bounds what an attacker can make us parse.
MANIFEST_BYTES_MAX = 4 << 20
# NAME_MAX of every filesystem we write to, applied to the whole path to keep messages short too.
PATH_BYTES_MAX = 255
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_HASH_BLOCK_BYTES = 1 << 20

EngineKind = Literal["patchctl-torch", "tensorrt_llm"]


class BuildInvalidError(ValueError):
    """A folder is not a sound build: unparsable manifest, unsafe path, missing, extra or altered file."""


class BuildFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a build. ``path`` is relative, POSIX, and never leaves the folder."""

    path: str
    sha256: str
    size_bytes: int


class RuntimeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How patchctl's own engine runs the model; other engine kinds ignore it.

    Attributes:
        dtype: compute and KV dtype. float32 on a CPU without bf16 units: measured 82 ms against
            115 ms for one four-row step of a 135M model.
        batch_sizes: decode batch sizes to capture a graph for, ascending; the last is the limit.
        contexts: KV lengths to capture for, in tokens, ascending; the last is the context limit.
        prefill_chunk_tokens: prompt tokens processed beside one decode step.
        kv_block_tokens: tokens per KV block; 16 as in vLLM: small enough to share prefixes, large enough to copy.
        kv_blocks: KV blocks to reserve; 0 for half as many again as full sequences need, which leaves room
            for prefixes and for rebuilding KV beside the serving generation.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_sizes: tuple[int, ...] = (1, 2, 4)
    contexts: tuple[int, ...] = (256, 512)
    prefill_chunk_tokens: int = 16
    kv_block_tokens: int = 16
    kv_blocks: int = 0


_ADDED_OPTIONS = ("kv_block_tokens", "kv_blocks")
_DEFAULT_OPTIONS = RuntimeOptions()


class BuildManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``build.json``.

    Attributes:
        model: the Hugging Face ``config.json`` of the model, as parsed JSON; of a TensorRT-LLM engine its
            ``pretrained_config``.
        files: every file of the build except ``build.json``, sorted by path.
        request_path: path of the request-path module, run by the front (one of ``files``).
        engine_kind: the engine the files are for. ``tensorrt_llm`` files are one atomic set, see
            :mod:`engine.adapters.tensorrt_llm.engine_set`.
    """

    name: str
    version: str
    model: dict[str, Any]
    files: tuple[BuildFile, ...]
    runtime: RuntimeOptions
    request_path: str
    engine_kind: EngineKind = "patchctl-torch"
    schema_version: Literal[1] = 1

    def encode(self) -> bytes:
        """Canonical bytes (RFC 8785): same manifest, same bytes, any machine.

        Options that later versions added are left out at their default, so that older builds keep their digests.
        """
        facts = msgspec.to_builtins(self)
        for name in _ADDED_OPTIONS:
            if getattr(self.runtime, name) == getattr(_DEFAULT_OPTIONS, name):
                del facts["runtime"][name]
        return rfc8785.dumps(facts)

    @property
    def digest(self) -> str:
        """``sha256:<64 hex>`` of the canonical manifest: the build's name everywhere."""
        return "sha256:" + hashlib.sha256(self.encode()).hexdigest()

    def file(self, path: str) -> BuildFile | None:
        """The entry for ``path``, or None."""
        return next((entry for entry in self.files if entry.path == path), None)

    @property
    def weight_files(self) -> tuple[BuildFile, ...]:
        """The safetensors files, in manifest order."""
        return tuple(entry for entry in self.files if entry.path.endswith(".safetensors"))


def safe_path(path: str) -> bool:
    """True for a relative POSIX path without ``..``, empty parts, backslashes or control characters, <= 255 bytes."""
    if not path.isprintable() or not 0 < len(path.encode(errors="replace")) <= PATH_BYTES_MAX or "\\" in path:
        return False
    parts = path.split("/")
    return all(part not in ("", ".", "..") for part in parts) and not PurePosixPath(path).is_absolute()


def decode_manifest(raw: bytes) -> BuildManifest:
    """Parse and check a manifest.

    Raises:
        BuildInvalidError: too large, not canonical, unsafe or repeated path, bad digest, unknown field.
    """
    if len(raw) > MANIFEST_BYTES_MAX:
        raise BuildInvalidError(f"{MANIFEST_NAME} has {len(raw)} bytes, more than {MANIFEST_BYTES_MAX}")
    try:
        manifest = msgspec.json.decode(raw, type=BuildManifest)
        canonical = manifest.encode()
    except (msgspec.MsgspecError, rfc8785.CanonicalizationError, RecursionError) as error:
        raise BuildInvalidError(f"{MANIFEST_NAME} does not parse: {error}") from error
    if canonical != raw:
        raise BuildInvalidError(f"{MANIFEST_NAME} is not in canonical form (RFC 8785)")
    paths = [entry.path for entry in manifest.files]
    if paths != sorted(set(paths)):
        raise BuildInvalidError("files are not sorted by path, or one is listed twice")
    if len({path.casefold() for path in paths}) != len(paths):
        raise BuildInvalidError("two paths differ only in case")
    folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    if clash := folders & {*paths, MANIFEST_NAME}:
        raise BuildInvalidError(f"{min(clash)} is both a file and a folder")
    for entry in manifest.files:
        if not safe_path(entry.path) or entry.path == MANIFEST_NAME:
            raise BuildInvalidError(f"unsafe path {entry.path!r}")
        if not _HEX64.match(entry.sha256) or entry.size_bytes < 0:
            raise BuildInvalidError(f"{entry.path}: bad sha256 or size")
    if manifest.request_path not in paths:
        raise BuildInvalidError(f"request path {manifest.request_path!r} is not a file of the build")
    return manifest


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in 1 MiB blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _walk(folder: Path) -> list[str]:
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise BuildInvalidError(f"{path.relative_to(folder)} is neither a plain file nor a folder")
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    return names


def seal_build(
    folder: Path,
    *,
    name: str,
    version: str,
    model: dict[str, Any],
    request_path: str,
    runtime: RuntimeOptions | None = None,
    engine_kind: EngineKind = "patchctl-torch",
) -> BuildManifest:
    """Hash every file of ``folder`` and write its ``build.json``; returns the manifest.

    Raises:
        BuildInvalidError: the folder holds links, devices or unsafe names, lacks ``request_path``, or is not
            a whole set of files for ``engine_kind``.
    """
    files = tuple(
        BuildFile(path=rel, sha256=sha256_file(folder / rel), size_bytes=(folder / rel).stat().st_size)
        for rel in sorted(_walk(folder))
        if rel != MANIFEST_NAME
    )
    manifest = BuildManifest(
        name=name,
        version=version,
        model=model,
        files=files,
        runtime=runtime or RuntimeOptions(),
        request_path=request_path,
        engine_kind=engine_kind,
    )
    raw = manifest.encode()
    decode_manifest(raw)
    _check_kind(folder, manifest)
    (folder / MANIFEST_NAME).write_bytes(raw)
    return manifest


def read_manifest(folder: Path) -> BuildManifest:
    """Read ``folder/build.json`` without touching the other files.

    Raises:
        BuildInvalidError: as :func:`decode_manifest`, or the file is missing or unreadable.
    """
    path = folder / MANIFEST_NAME
    try:
        with path.open("rb") as stream:
            raw = stream.read(MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise BuildInvalidError(f"cannot read {path}: {error.strerror}") from error
    return decode_manifest(raw)


def verify_build(folder: Path, expected_digest: str | None = None) -> BuildManifest:
    """Re-hash the whole build; nothing missing, nothing extra, nothing altered, and a whole set for its engine.

    Raises:
        BuildInvalidError: on the first difference found.
    """
    manifest = read_manifest(folder)
    if expected_digest is not None and manifest.digest != expected_digest:
        raise BuildInvalidError(f"build is {manifest.digest}, expected {expected_digest}")
    present = {rel for rel in _walk(folder) if rel != MANIFEST_NAME}
    listed = {entry.path for entry in manifest.files}
    if present != listed:
        odd = sorted(present ^ listed)
        raise BuildInvalidError(f"files differ from {MANIFEST_NAME}: {', '.join(odd[:5])}")
    for entry in manifest.files:
        path = folder / entry.path
        if path.stat().st_size != entry.size_bytes or sha256_file(path) != entry.sha256:
            raise BuildInvalidError(f"{entry.path} does not match its sha256")
    _check_kind(folder, manifest)
    return manifest


def _check_kind(folder: Path, manifest: BuildManifest) -> None:
    """Beyond digests: the files are what the engine of this kind loads, all of them, and agree with ``model``."""
    if manifest.engine_kind != "tensorrt_llm":
        return
    if manifest.file(CONFIG_NAME) is None:
        raise BuildInvalidError(f"a build of kind tensorrt_llm needs {CONFIG_NAME}")
    with (folder / CONFIG_NAME).open("rb") as stream:
        config = stream.read(CONFIG_BYTES_MAX + 1)
    try:
        found = check_files((entry.path for entry in manifest.files), config)
    except EngineSetInvalidError as error:
        raise BuildInvalidError(str(error)) from error
    if manifest.model != found.model:
        raise BuildInvalidError(f"the manifest describes another model than {CONFIG_NAME}")
