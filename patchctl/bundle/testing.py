"""Small builds and patches for tests, here and in other packages' tests. No model runs on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from engine.build import seal_build
from patchctl.bundle.compose import PatchMeta
from patchctl.bundle.config import Declared

REQUEST_PATH = "request_path.py"
META = PatchMeta(
    patch_id="fix-1", channel="stable", sequence=7, created_unix=1_700_000_000, expires_unix=1_800_000_000, author="dev"
)
NOTHING_DECLARED = Declared(files=(), tensors=(), growth_bytes_per_request_max=None, summary="")


def safetensors_bytes(tensors: Mapping[str, bytes], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file of one-dimensional U8 tensors, in the order given."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, content in tensors.items():
        table[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [at, at + len(content)]}
        at += len(content)
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(tensors.values())


def write_build(folder: Path, files: Mapping[str, bytes], *, version: str = "1") -> str:
    """Write and seal a build with ``files`` and a request path; returns its digest."""
    for path, content in {REQUEST_PATH: b"", **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return seal_build(folder, name="tiny", version=version, model={"eps": 1e-5}, request_path=REQUEST_PATH).digest


def sample_builds(root: Path) -> tuple[Path, Path]:
    """Folders of a base and a target that differ in every way: keep, put, add, remove, replaced tensors."""
    tensors = {f"layers.{i}.weight": bytes([i]) * 600 for i in range(6)}
    base, target = root / "base", root / "target"
    write_build(
        base,
        {
            "model.safetensors": safetensors_bytes(tensors),
            "tokenizer.json": b"{}" * 300,
            "old/gone.txt": b"gone",
            REQUEST_PATH: b"LIMIT = 1\n",
        },
    )
    write_build(
        target,
        {
            "model.safetensors": safetensors_bytes({**tensors, "layers.2.weight": b"new" * 200}),
            "tokenizer.json": b"{}" * 300,
            "new/notes.txt": b"added",
            REQUEST_PATH: b"LIMIT = 2\n",
        },
        version="2",
    )
    return base, target
