"""An open patch file: everything checked, one file descriptor held from the check to the use.

Holding the descriptor makes a later replacement of the path irrelevant. A change of the file itself is
found when a blob is used, because whoever uses one hashes it again.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from patchctl.bundle.config import PatchConfig
from patchctl.bundle.consistency import ConfigInvalidError
from patchctl.bundle.decode import CONFIG_BYTES_MAX, ConfigUnsupportedError, decode_config
from patchctl.bundle.layout import Contents, Span, scan
from patchctl.bundle.manifest import MANIFEST_BYTES_MAX, encode_index, encode_manifest, layers
from patchctl.bundle.ranges import read_range
from patchctl.bundle.refusal import damaged, unsupported
from patchctl.errors import ExitCode, PatchctlError

_T = TypeVar("_T")


class _Descriptor(msgspec.Struct):
    digest: str


class _Index(msgspec.Struct):
    manifests: tuple[_Descriptor]


class _Manifest(msgspec.Struct):
    config: _Descriptor


class PatchFile:
    """A patch file whose every byte was checked. Close it, or use it as a context manager.

    Attributes:
        config: the checked config.
        manifest_digest: hex sha256 of the OCI manifest, the subject of every signature.
        manifest: the OCI manifest's bytes.
        size_bytes: size of the file.
        blobs: every blob (manifest, config, layers) by hex sha256.
        fd: the descriptor all reads go through, with ``pread``.
    """

    def __init__(self, fd: int) -> None:
        """Check the file behind ``fd``, which this object owns from now on. Use :meth:`open`."""
        self.fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise damaged("it is not a regular file")
        self.size_bytes = status.st_size
        contents = scan(fd, self.size_bytes)
        self.blobs: Mapping[str, Span] = contents.blobs
        index = _decode(contents.index, _Index, "index.json")
        self.manifest = self._read(index.manifests[0].digest, MANIFEST_BYTES_MAX)
        self.manifest_digest = hashlib.sha256(self.manifest).hexdigest()
        config_bytes = self._read(_decode(self.manifest, _Manifest, "the manifest").config.digest, CONFIG_BYTES_MAX)
        try:
            self.config: PatchConfig = decode_config(config_bytes)
        except ConfigUnsupportedError as error:
            raise unsupported(str(error)) from error
        except ConfigInvalidError as error:
            raise damaged(str(error)) from error
        self._check_derived(contents, config_bytes)

    @classmethod
    def open(cls, source: Path | int) -> Self:
        """Open and check a patch file, given by path or by a descriptor (which is duplicated).

        Raises:
            PatchctlError: ``patch.not_found``, ``patch.unreadable``, ``patch.damaged`` (any byte is not
                what the writer would have written), ``patch.unsupported`` (a later schema version).
        """
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            fd = os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_NONBLOCK)
            try:
                return cls(fd)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise _unreadable(source, error) from error

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, digest: str, size_bytes_max: int) -> bytes:
        span = self.blobs.get(digest.removeprefix("sha256:"))
        if span is None or span.size_bytes > size_bytes_max:
            raise damaged(f"blob {digest} is missing or too large")
        raw = b"".join(read_range(self.fd, span.offset, span.size_bytes))
        if hashlib.sha256(raw).hexdigest() != digest.removeprefix("sha256:"):
            raise damaged(f"blob {digest} changed while it was read")
        return raw

    def _check_derived(self, contents: Contents, config_bytes: bytes) -> None:
        """Manifest, index and the set of blobs must be those that follow from the config."""
        if self.manifest != encode_manifest(self.config, config_bytes):
            raise damaged("the manifest does not follow from the config")
        if contents.index != encode_index(self.manifest):
            raise damaged("index.json does not follow from the manifest")
        expected = {layer.sha256: layer.size_bytes for layer in layers(self.config)}
        expected[hashlib.sha256(config_bytes).hexdigest()] = len(config_bytes)
        expected[self.manifest_digest] = len(self.manifest)
        if {sha256: span.size_bytes for sha256, span in contents.blobs.items()} != expected:
            raise damaged("the blobs are not exactly those the manifest names")


def _decode(raw: bytes, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise damaged(f"{what} does not parse: {error}") from error


def _unreadable(source: Path | int, error: OSError) -> PatchctlError:
    missing = isinstance(error, FileNotFoundError)
    return PatchctlError(
        code="patch.not_found" if missing else "patch.unreadable",
        what="The patch file cannot be read.",
        why=f"{source}: {error.strerror}",
        exit_code=ExitCode.NOT_FOUND if missing else ExitCode.USAGE,
    )
