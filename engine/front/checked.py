"""A build's files as the front reads them: the bytes returned are the bytes that were hashed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.build import BuildManifest

# Largest file the front reads: a tokenizer.json with 256,000 entries has 34 MB. Weights are never read here.
_FILE_BYTES_MAX = 64 << 20


class BuildRefusedError(ValueError):
    """The build cannot be served by this front; the message says why."""


def read_checked(folder: Path, manifest: BuildManifest, path: str) -> bytes:
    """Read one file of the build, once, and compare it with the manifest.

    Raises:
        BuildRefusedError: not listed, missing, too large, or its size or sha256 differs.
    """
    entry = manifest.file(path)
    if entry is None:
        raise BuildRefusedError(f"the build has no {path}")
    if entry.size_bytes > _FILE_BYTES_MAX:
        raise BuildRefusedError(f"{path} has {entry.size_bytes} bytes, more than {_FILE_BYTES_MAX}")
    try:
        with (folder / path).open("rb") as stream:
            data = stream.read(entry.size_bytes + 1)
    except OSError as error:
        raise BuildRefusedError(f"cannot read {path}: {error.strerror}") from error
    if len(data) != entry.size_bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise BuildRefusedError(f"{path} does not match its sha256")
    return data
