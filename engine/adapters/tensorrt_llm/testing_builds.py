"""Builds of kind ``tensorrt_llm`` that no GPU could run, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.adapters.tensorrt_llm.artifact import seal_engine_build
from engine.build import BuildManifest

REQUEST_PATH = "request_path.py"


def engine_config(*, version: str = "1.2.0", world_size: int = 1, dtype: str = "bfloat16") -> dict[str, Any]:
    """``config.json`` as ``trtllm-build`` writes it, shortened."""
    return {
        "version": version,
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": dtype,
            "hidden_size": 64,
            "mapping": {"world_size": world_size, "tp_size": world_size, "pp_size": 1, "cp_size": 1, "rank": 0},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
        },
        "build_config": {
            "max_input_len": 256,
            "max_seq_len": 512,
            "max_batch_size": 8,
            "max_beam_width": 1,
            "max_num_tokens": 2048,
            "opt_num_tokens": 8,
            "kv_cache_type": "PAGED",
            "plugin_config": {
                "dtype": dtype,
                "paged_kv_cache": True,
                "nccl_plugin": dtype if world_size > 1 else None,
            },
        },
    }


def write_engine_set(
    folder: Path, *, weights: str = "a", version: str = "1.2.0", world_size: int = 1, size_bytes: int | None = None
) -> BuildManifest:
    """A sealed engine set; ``size_bytes`` lets ``build.json`` claim larger engines than are there."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(engine_config(version=version, world_size=world_size)))
    for rank in range(world_size):
        (folder / f"rank{rank}.engine").write_bytes(f"{weights} of rank {rank}".encode())
    return _seal(folder, weights, size_bytes)


def write_checkpoint(
    folder: Path,
    *,
    weights: str = "a",
    shapes: Mapping[str, list[int]] | None = None,
    hidden: int = 4,
    size_bytes: int | None = None,
) -> BuildManifest:
    """A sealed Hugging Face folder with two weight files, of float32 tensors filled with ``weights``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": hidden}))
    for part, (name, shape) in enumerate((shapes or {"embed": [4, 2], "head": [2]}).items()):
        (folder / f"model-{part}.safetensors").write_bytes(_safetensors(name, shape, weights))
    return _seal(folder, weights, size_bytes)


def _safetensors(name: str, shape: list[int], fill: str) -> bytes:
    size = 4
    for length in shape:
        size *= length
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + fill.encode().ljust(size, b"\0")[:size]


def _seal(folder: Path, version: str, size_bytes: int | None) -> BuildManifest:
    (folder / REQUEST_PATH).write_text('"""Not run by these tests."""\n')
    manifest = seal_engine_build(folder, name="toy", version=version, request_path=REQUEST_PATH)
    if size_bytes is not None:
        raw = json.loads((folder / "build.json").read_bytes())
        for entry in raw["files"]:
            if entry["path"].endswith((".engine", ".safetensors")):
                entry["size_bytes"] = size_bytes
        (folder / "build.json").write_text(json.dumps(raw, sort_keys=True, separators=(",", ":")))
    return manifest
