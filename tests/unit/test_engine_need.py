"""What a build needs, from its manifest: files shared with the serving build count once."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch

from engine.build import BuildManifest, RuntimeOptions
from engine.llama import parse_config, tensor_shapes
from engine.loaded import load_build
from engine.need import need_of
from engine.testing import TINY_RUNTIME, tiny_build


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> BuildManifest:
    return tiny_build(tmp_path_factory.mktemp("need") / "a", seed=1, version="1.0.0")


def weights_bytes(manifest: BuildManifest) -> int:
    shapes = tensor_shapes(parse_config(manifest.model)).values()
    return 4 * sum(math.prod(shape) for shape in shapes)


def other_weights(manifest: BuildManifest) -> BuildManifest:
    files = tuple(
        msgspec.structs.replace(entry, sha256="0" * 64) if entry.path.endswith(".safetensors") else entry
        for entry in manifest.files
    )
    return msgspec.structs.replace(manifest, files=files)


def test_the_first_build_needs_everything(manifest: BuildManifest) -> None:
    need = need_of(manifest, device="cpu", serving=None)
    # The file has a header too.
    assert weights_bytes(manifest) <= need.weights_bytes <= 1.1 * weights_bytes(manifest)
    assert (need.graphs_bytes, need.copy_bytes) == (0, None)


def test_equal_weights_are_not_counted_again(manifest: BuildManifest) -> None:
    again = msgspec.structs.replace(manifest, version="1.0.1")
    need = need_of(again, device="cpu", serving=manifest)
    assert need.weights_bytes == 0
    assert need.workspace_bytes < need_of(again, device="cpu", serving=None).workspace_bytes, "the KV pool is shared"


def test_changed_weights_are(manifest: BuildManifest) -> None:
    need = need_of(other_weights(manifest), device="cpu", serving=manifest)
    assert need.weights_bytes >= weights_bytes(manifest)
    # On a CPU copying saves nothing: the overwritten pages become a second set.
    assert need.copy_bytes == 2 * need.weights_bytes
    need = need_of(other_weights(manifest), device="cuda", serving=manifest)
    assert need.copy_bytes == need.weights_bytes, "less than a chunk"
    assert need.graphs_bytes > 0


def test_another_dtype_shares_nothing(manifest: BuildManifest) -> None:
    runtime = msgspec.structs.replace(TINY_RUNTIME, dtype="bfloat16")
    need = need_of(msgspec.structs.replace(manifest, runtime=runtime), device="cpu", serving=manifest)
    assert need.weights_bytes > 0
    assert need.copy_bytes is None


def test_another_kv_layout_brings_a_pool_of_its_own(manifest: BuildManifest, tmp_path: Path) -> None:
    runtime = RuntimeOptions(batch_sizes=(1, 2), contexts=(256,), prefill_chunk_tokens=8)
    larger = tiny_build(tmp_path / "b", seed=1, version="1.0.0", runtime=runtime)
    need = need_of(larger, device="cpu", serving=manifest)
    same = need_of(larger, device="cpu", serving=larger)
    pool = load_build(tmp_path / "b", device=torch.device("cpu")).new_pool()
    assert need.workspace_bytes - same.workspace_bytes == pool.size_bytes
