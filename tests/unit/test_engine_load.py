"""What the engine loads, and what it refuses to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from engine.build import RuntimeOptions, decode_manifest, seal_build
from engine.errors import LoadError
from engine.golden import GOLDEN_TOKENS, golden_tokens
from engine.llama import parse_config
from engine.loaded import load_build
from engine.testing import TINY_RUNTIME, random_weights, tiny_build, tiny_config
from engine.weights import INDEX_NAME, weights_digest

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)
def test_unsupported_configuration_is_refused_by_name(change: dict[str, Any], names: str) -> None:
    with pytest.raises(LoadError, match=names):
        parse_config(tiny_config() | change)


def test_transformers_5_spelling_of_the_rotary_base() -> None:
    config = tiny_config()
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    assert parse_config(config).rope_theta == 500000.0


@pytest.mark.parametrize(
    "runtime",
    [
        RuntimeOptions(batch_sizes=(2, 1)),
        RuntimeOptions(batch_sizes=()),
        RuntimeOptions(contexts=(0, 16)),
        RuntimeOptions(contexts=(16, 32), prefill_chunk_tokens=17),
        RuntimeOptions(contexts=(256, 1024)),
        RuntimeOptions(batch_sizes=tuple(range(1, 40)), contexts=(16, 32), prefill_chunk_tokens=4),
    ],
)
def test_unusable_runtime_options_are_refused(tmp_path: Path, runtime: RuntimeOptions) -> None:
    tiny_build(tmp_path / "b", seed=1, version="1.0.0", runtime=runtime)
    with pytest.raises(LoadError, match="runtime"):
        load_build(tmp_path / "b", device=CPU)


def _seal(folder: Path, weights: dict[str, torch.Tensor], *, file: str = "model.safetensors") -> None:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / file)
    (folder / "rp.py").write_text("")
    seal_build(folder, name="t", version="1.0.0", model=tiny_config(), request_path="rp.py", runtime=TINY_RUNTIME)


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "dtype", "damaged", "repeated"])
def test_wrong_tensors_are_refused(tmp_path: Path, fault: str) -> None:
    weights = random_weights(tiny_config(), seed=1)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "extra":
        weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)
    elif fault == "shape":
        weights[name] = weights[name].t().contiguous()
    elif fault == "dtype":
        weights[name] = weights[name].to(torch.float64)
    _seal(tmp_path / "b", weights)
    if fault == "damaged":
        (tmp_path / "b" / "model.safetensors").write_bytes(b"\xff" * 100)
    if fault == "repeated":
        _seal(tmp_path / "b", {name: weights[name]}, file="more.safetensors")
    with pytest.raises(LoadError, match=r"safetensors|missing"):
        load_build(tmp_path / "b", device=CPU)


def test_shards_load_as_one_and_must_agree_with_their_index(tmp_path: Path) -> None:
    weights = random_weights(tiny_config(), seed=1)
    folder, names = tmp_path / "b", sorted(weights)
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    folder.mkdir()
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": files}))
    (folder / "rp.py").write_text("")
    kwargs: dict[str, Any] = {"name": "t", "version": "1.0.0", "model": tiny_config(), "request_path": "rp.py"}
    seal_build(folder, **kwargs, runtime=TINY_RUNTIME)
    loaded = load_build(folder, device=CPU)
    assert all(torch.equal(loaded.model.weights[name], weights[name]) for name in names)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": files | {names[0]: "elsewhere.safetensors"}}))
    seal_build(folder, **kwargs, runtime=TINY_RUNTIME)
    with pytest.raises(LoadError, match="elsewhere"):
        load_build(folder, device=CPU)


def test_weights_of_the_compute_dtype_are_mapped_not_copied(tmp_path: Path) -> None:
    tiny_build(tmp_path / "b", seed=1, version="1.0.0")
    loaded = load_build(tmp_path / "b", device=CPU)
    address = loaded.model.weights["model.norm.weight"].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            assert line.endswith("model.safetensors")
            return
    pytest.fail("the tensor is not in a mapping")


def test_another_build_than_asked_for_is_refused(tmp_path: Path) -> None:
    tiny_build(tmp_path / "b", seed=1, version="1.0.0")
    with pytest.raises(LoadError, match="expected sha256:00"):
        load_build(tmp_path / "b", device=CPU, expected_digest="sha256:00")


def test_weights_digest_ignores_everything_but_weights(tmp_path: Path) -> None:
    one, same, other = (
        tiny_build(tmp_path / version, seed=seed, version=version, extra_files={"x": version.encode()})
        for seed, version in ((1, "1.0.0"), (1, "1.0.1"), (2, "1.0.2"))
    )
    assert weights_digest(one) == weights_digest(same) != weights_digest(other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_golden_tokens_are_repeatable(tmp_path: Path, dtype: Any) -> None:
    runtime = RuntimeOptions(dtype=dtype, batch_sizes=(1,), contexts=(32,), prefill_chunk_tokens=8)
    tiny_build(tmp_path / "b", seed=1, version="1.0.0", runtime=runtime)
    tokens = golden_tokens(tmp_path / "b")
    assert len(tokens) == GOLDEN_TOKENS
    assert tokens == golden_tokens(tmp_path / "b")


def test_builds_from_before_an_option_existed_keep_their_digest(tmp_path: Path) -> None:
    manifest = tiny_build(tmp_path / "b", seed=1, version="1.0.0")
    raw = (tmp_path / "b" / "build.json").read_bytes()
    assert b"kv_block" not in raw
    assert decode_manifest(raw) == manifest
    other = tiny_build(tmp_path / "c", seed=1, version="1.0.0", runtime=replace(TINY_RUNTIME, kv_blocks=9))
    assert other.runtime.kv_blocks == 9
    assert b'"kv_blocks":9' in (tmp_path / "c" / "build.json").read_bytes()


def test_a_build_for_another_engine_is_refused_by_its_kind(tmp_path: Path) -> None:
    manifest = tiny_build(tmp_path / "b", seed=1, version="1.0.0")
    (tmp_path / "b" / "build.json").write_bytes(replace(manifest, engine_kind="tensorrt_llm").encode())
    with pytest.raises(LoadError, match="kind tensorrt_llm"):
        load_build(tmp_path / "b", device=CPU)
