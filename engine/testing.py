"""A small random Llama build, for tests of everything that loads, ships or serves one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.build import BuildManifest, RuntimeOptions, seal_build
from engine.llama import parse_config, tensor_shapes

_HEAD_DIM = 16
TINY_RUNTIME = RuntimeOptions(batch_sizes=(1, 2, 4), contexts=(32, 64), prefill_chunk_tokens=8)
DEFAULT_REQUEST_PATH = b'"""A request path without code: tests of the engine never run one."""\n'


def tiny_config(*, layers: int = 2, hidden: int = 64, vocab: int = 256, tied: bool = True) -> dict[str, Any]:
    """A Hugging Face ``config.json`` with half as many KV heads as heads."""
    heads = hidden // _HEAD_DIM
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads // 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
    }


def random_weights(config: dict[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """float32 tensors of a model whose logits spread widely, so that greedy decoding has no near ties."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(parse_config(config)).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * 2 / shape[-1] ** 0.5
    return weights


def tiny_build(
    folder: Path,
    *,
    seed: int,
    version: str,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = 256,
    request_path: str = "request_path.py",
    extra_files: Mapping[str, bytes] | None = None,
    config: dict[str, Any] | None = None,
    runtime: RuntimeOptions = TINY_RUNTIME,
) -> BuildManifest:
    """Write a sealed build into ``folder`` (created; must be empty or absent) and return its manifest.

    Same ``seed`` and shape give the same weight file; ``version`` alone changes only the manifest.

    Args:
        folder: where the build goes.
        seed: of the weights.
        version: build version.
        layers: decoder layers.
        hidden: hidden size, a multiple of 32.
        vocab: vocabulary size.
        request_path: path of the request-path module; an empty one is written unless ``extra_files`` has it.
        extra_files: further files by relative path, for example ``tokenizer.json``.
        config: a whole model configuration instead of :func:`tiny_config` of the shape above.
        runtime: how the engine runs it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = config or tiny_config(layers=layers, hidden=hidden, vocab=vocab)
    save_file(random_weights(model, seed=seed), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model, indent=1, sort_keys=True))
    for path, content in {request_path: DEFAULT_REQUEST_PATH, **(extra_files or {})}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return seal_build(
        folder, name="tiny-llama", version=version, model=model, request_path=request_path, runtime=runtime
    )
