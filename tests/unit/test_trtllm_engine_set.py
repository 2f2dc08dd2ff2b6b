"""Builds of kind ``tensorrt_llm``: one whole set, or refused with the reason."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.adapters.tensorrt_llm.artifact import seal_engine_build
from engine.adapters.tensorrt_llm.engine_set import Checkpoint, EngineSet, EngineSetInvalidError, check_files
from engine.adapters.tensorrt_llm.testing_builds import REQUEST_PATH, engine_config, write_checkpoint, write_engine_set
from engine.build import BuildInvalidError, decode_manifest, read_manifest, seal_build, verify_build
from engine.testing import tiny_build

Edit = Callable[[dict[str, Any]], object]


def names(world_size: int) -> set[str]:
    return {"config.json", "build.json", *(f"rank{rank}.engine" for rank in range(world_size))}


def check(config: dict[str, Any], files: set[str]) -> EngineSet | Checkpoint:
    return check_files(files, json.dumps(config).encode())


def test_reads_what_matters() -> None:
    found = check(engine_config(world_size=2), names(2))
    assert isinstance(found, EngineSet)
    assert (found.version, found.dtype, found.kv_cache_type, found.kv_quantization) == (
        "1.2.0",
        "bfloat16",
        "PAGED",
        "FP8",
    )
    assert (found.world_size, found.tp_size, found.pp_size, found.cp_size) == (2, 2, 1, 1)
    assert (found.max_batch_size, found.max_seq_len, found.max_num_tokens) == (8, 512, 2048)
    assert found.engines == ("rank0.engine", "rank1.engine")
    assert found.model["hidden_size"] == 64


def test_ten_ranks_are_in_numeric_order() -> None:
    found = check(engine_config(world_size=11), names(11))
    assert isinstance(found, EngineSet)
    assert found.engines[2] == "rank2.engine"
    assert found.engines[10] == "rank10.engine"


@given(st.integers(1, 9), st.sets(st.integers(0, 12), max_size=13))
def test_only_exactly_the_ranks_of_the_mapping_are_a_set(world_size: int, ranks: set[int]) -> None:
    files = {"config.json", *(f"rank{rank}.engine" for rank in ranks)}
    if ranks == set(range(world_size)):
        check(engine_config(world_size=world_size), files)
    else:
        with pytest.raises(EngineSetInvalidError, match=r"rank\d+\.engine is (missing|extra)"):
            check(engine_config(world_size=world_size), files)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (names(2) - {"rank1.engine"}, "rank1.engine is missing; the mapping has 2 ranks"),
        (names(3), "rank2.engine is extra; the mapping has 2 ranks"),
        (names(2) | {"rank01.engine"}, "rank01.engine is not where or how"),
        (names(2) | {"old/rank0.engine"}, "old/rank0.engine is not where or how"),
        (names(2) | {"RANK2.ENGINE"}, "RANK2.ENGINE is not where or how"),
        (names(2) | {"rank0_managed_weights.safetensors"}, "rank1_managed_weights.safetensors is missing"),
        (
            names(2) | {f"rank{rank}_managed_weights.safetensors" for rank in range(3)},
            "rank2_managed_weights.safetensors is extra",
        ),
        (names(0), "rank0.engine is missing"),
    ],
)
def test_refuses_a_set_with_wrong_files(files: set[str], why: str) -> None:
    with pytest.raises(EngineSetInvalidError, match=why):
        check(engine_config(world_size=2), files)


def test_managed_weights_of_all_ranks_are_part_of_the_set() -> None:
    found = check(engine_config(world_size=2), names(2) | {f"rank{r}_managed_weights.safetensors" for r in range(2)})
    assert isinstance(found, EngineSet)
    assert len(found.managed_weights) == 2


def _put(*path: str, to: object) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        for part in path[:-1]:
            config = config[part]
        config[path[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (_put("pretrained_config", "mapping", "world_size", to=4), "world_size is 4, but tp 2 \\* pp 1 \\* cp 1 is 2"),
        (_put("pretrained_config", "mapping", "world_size", to=0), "world_size is 0"),
        (_put("pretrained_config", "mapping", "tp_size", to=-2), "size below 1"),
        (_put("pretrained_config", "mapping", "world_size", to=True), "Expected `int`, got `bool`"),
        (_put("pretrained_config", "dtype", to="float16"), "plugin_config.dtype is bfloat16, but .* is float16"),
        (_put("build_config", "plugin_config", "nccl_plugin", to=None), "built for one GPU"),
        (_put("build_config", "plugin_config", "paged_kv_cache", to=False), "kv_cache_type is PAGED, but .* False"),
        (_put("build_config", "kv_cache_type", to="RING"), "kv_cache_type is 'RING'"),
        (_put("build_config", "max_batch_size", to=0), "max_batch_size is 0"),
        (_put("build_config", "max_input_len", to=1024), "max_input_len 1024 is larger than max_seq_len 512"),
        (_put("version", to="0.21.0"), "built by TensorRT-LLM 0.21.0; supported is 1.0 or later, before 2.0"),
        (_put("version", to="2.0.0"), "built by TensorRT-LLM 2.0.0"),
        (_put("version", to="latest"), "'latest' is not a version"),
        (lambda config: config.pop("version"), "has no version"),
        (lambda config: config.pop("build_config"), "has no build_config"),
        (lambda config: config.pop("pretrained_config"), "has no pretrained_config"),
        (lambda config: config["build_config"].pop("max_seq_len"), "missing required field `max_seq_len`"),
        (lambda config: config["pretrained_config"].pop("architecture"), "missing required field `architecture`"),
    ],
)
def test_refuses_a_config_that_contradicts_itself(edit: Edit, why: str) -> None:
    config = engine_config(world_size=2)
    edit(config)
    with pytest.raises(EngineSetInvalidError, match=why):
        check(config, names(2))


@pytest.mark.parametrize("version", ["1.0.0", "1.2.0rc2", "1.2.0rc6.post2", "1.4.0rc4"])
def test_accepts_published_versions(version: str) -> None:
    check(engine_config(version=version), names(1))


def test_automatic_sharding_has_a_world_size_alone() -> None:
    config = engine_config(world_size=2)
    config["pretrained_config"]["mapping"] |= {"auto_parallel": True, "tp_size": 1}
    check(config, names(2))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"[" * 100_000, b" " * (4 << 20) + b"{}", b'{"a": NaN}'])
def test_refuses_what_is_no_config(raw: bytes) -> None:
    with pytest.raises(EngineSetInvalidError):
        check_files(names(1), raw)


def test_a_checkpoint_is_a_layout_of_its_own() -> None:
    found = check({"architectures": ["LlamaForCausalLM"]}, {"config.json", "model.safetensors"})
    assert isinstance(found, Checkpoint)
    assert found.weights == ("model.safetensors",)


@pytest.mark.parametrize(
    ("config", "files", "why"),
    [
        ({"architectures": ["Llama"]}, {"config.json"}, "nothing that TensorRT-LLM could load"),
        ({"architectures": []}, {"config.json", "model.safetensors"}, "neither an engine's"),
        ({}, {"config.json"}, "neither an engine's"),
        ({"architectures": ["Llama"]}, {"config.json", "model.safetensors", "rank0.engine"}, "has no version"),
    ],
)
def test_refuses_what_is_neither(config: dict[str, Any], files: set[str], why: str) -> None:
    with pytest.raises(EngineSetInvalidError, match=why):
        check(config, files)


def test_seals_and_verifies(tmp_path: Path) -> None:
    manifest = write_engine_set(tmp_path / "a", world_size=2)
    assert manifest.engine_kind == "tensorrt_llm"
    assert manifest.model == engine_config(world_size=2)["pretrained_config"]
    assert verify_build(tmp_path / "a", manifest.digest) == manifest
    assert decode_manifest(manifest.encode()) == manifest
    assert verify_build(tmp_path / "a").digest != write_engine_set(tmp_path / "b", weights="b", world_size=2).digest
    assert write_checkpoint(tmp_path / "c").model["hidden_size"] == 4


@pytest.mark.parametrize("victim", ["rank1.engine", "config.json"])
def test_does_not_seal_half_a_set(tmp_path: Path, victim: str) -> None:
    write_engine_set(tmp_path / "a", world_size=2)
    (tmp_path / "a" / victim).unlink()
    with pytest.raises(BuildInvalidError, match=r"rank1\.engine is missing|config\.json"):
        seal_engine_build(tmp_path / "a", name="toy", version="1", request_path=REQUEST_PATH)


def _reseal(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite ``build.json`` consistently, as an attacker or a bug in a release job could."""
    raw = json.loads((folder / "build.json").read_bytes())
    edit(raw)
    (folder / "build.json").write_text(json.dumps(raw, sort_keys=True, separators=(",", ":")))
    decode_manifest((folder / "build.json").read_bytes())


def test_verify_refuses_half_a_set_whose_manifest_agrees(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_engine_set(folder, world_size=2)
    (folder / "rank1.engine").unlink()
    _reseal(folder, lambda raw: raw["files"].remove(next(e for e in raw["files"] if e["path"] == "rank1.engine")))
    assert read_manifest(folder).file("rank1.engine") is None
    with pytest.raises(BuildInvalidError, match=r"rank1\.engine is missing"):
        verify_build(folder)


def test_verify_refuses_a_manifest_of_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_engine_set(folder)
    _reseal(folder, lambda raw: raw["model"].update(hidden_size=128))
    with pytest.raises(BuildInvalidError, match="another model"):
        verify_build(folder)


def test_verify_refuses_a_torch_build_relabelled(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    manifest = tiny_build(folder, seed=0, version="1")
    config = copy.deepcopy(manifest.model)
    (folder / "config.json").unlink()
    with pytest.raises(BuildInvalidError, match=r"needs config\.json"):
        seal_build(folder, name="x", version="1", model=config, request_path=REQUEST_PATH, engine_kind="tensorrt_llm")


def test_unknown_kinds_stay_refused(tmp_path: Path) -> None:
    write_engine_set(tmp_path / "a")
    with pytest.raises(BuildInvalidError, match="Invalid enum value 'vllm'"):
        _reseal(tmp_path / "a", lambda raw: raw.update(engine_kind="vllm"))


def test_the_kind_adds_nothing_to_builds_of_our_own_engine(tmp_path: Path) -> None:
    (tmp_path / "request_path.py").write_bytes(b"")
    manifest = seal_build(tmp_path, name="n", version="1", model={"a": 1}, request_path="request_path.py")
    raw = json.loads((tmp_path / "build.json").read_bytes())
    fields = {"name", "version", "model", "files", "runtime", "request_path", "engine_kind", "schema_version"}
    assert raw.keys() == fields
    assert raw["engine_kind"] == "patchctl-torch"
    assert verify_build(tmp_path) == manifest
