"""A patch as plain data, for ``patchctl inspect``."""

from __future__ import annotations

from typing import Any

import msgspec

from patchctl.bundle.config import Keep, Put, TensorDelta
from patchctl.bundle.declaration import undeclared
from patchctl.bundle.read import PatchFile


def describe(patch: PatchFile) -> dict[str, Any]:
    """What the patch is, changes and declares; JSON types only, kept files as a count."""
    config = patch.config
    missing = undeclared(config)
    return {
        "patch_id": config.patch_id,
        "channel": config.channel,
        "sequence": config.sequence,
        "created_unix": config.created_unix,
        "expires_unix": config.expires_unix,
        "author": config.author,
        "manifest_digest": patch.manifest_digest,
        "size_bytes": patch.size_bytes,
        "engine_kind": config.engine_kind,
        "constraints": msgspec.to_builtins(config.constraints),
        "base_digest": config.base_digest,
        "target": {
            "digest": config.target_digest,
            "name": config.target_manifest.name,
            "version": config.target_manifest.version,
        },
        "changes": [_change(action) for action in config.files if not isinstance(action, Keep)],
        "removed": list(config.removed),
        "kept_files": sum(isinstance(action, Keep) for action in config.files),
        "declared": msgspec.to_builtins(config.declared),
        "coverage": missing.coverage,
        "undeclared": {"files": list(missing.files), "tensors": list(missing.tensors)},
    }


def _change(action: Put | TensorDelta) -> dict[str, Any]:
    if isinstance(action, Put):
        how = "add" if action.old_sha256 is None else "replace"
        return {"path": action.path, "change": how, "size_bytes": action.size_bytes}
    tensors = [
        {"name": change.name, "dtype": change.dtype, "shape": list(change.shape), "size_bytes": change.size_bytes}
        for change in action.tensors
    ]
    return {"path": action.path, "change": "tensors", "size_bytes": action.size_bytes, "tensors": tensors}
