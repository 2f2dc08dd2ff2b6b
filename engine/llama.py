"""The Llama architecture as data: checked configuration, tensor table, rotary frequencies.

Field names are those of the Hugging Face ``config.json``. What the forward pass does not implement is
refused by name: a silently ignored option would serve a different model. Pure, no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.errors import LoadError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3 rotary scaling (``rope_type: llama3``), as in Hugging Face ``modeling_rope_utils``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A supported Llama-family decoder. Sizes in elements, ``rope_theta`` unitless."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    positions_max: int
    tied: bool


# Options with one supported value each. None in the file means the default, which is that value.
_ONLY: tuple[tuple[str, object], ...] = (
    ("model_type", "llama"),
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("partial_rotary_factor", 1.0),
    ("quantization_config", None),
)


def _size(model: dict[str, Any], key: str, default: int | None = None) -> int:
    value = model.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise LoadError(f"config: {key} must be a positive integer, not {value!r}")
    return value


def _number(model: dict[str, Any], key: str, default: float | None = None) -> float:
    value = model.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise LoadError(f"config: {key} must be a positive number, not {value!r}")
    return float(value)


def _rope(model: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta``/``rope_scaling``."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise LoadError("config: rope_parameters must be an object")
    theta = _number({**model, **rope}, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise LoadError(f"config: rope type {kind!r} is not supported (default, llama3)")
    scaling = RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_position_embeddings=_size(rope, "original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise LoadError("config: high_freq_factor must be above low_freq_factor")
    return theta, scaling


def parse_config(model: dict[str, Any]) -> LlamaConfig:
    """Check a parsed ``config.json``.

    Raises:
        LoadError: an option is missing, malformed or not supported; the message names it.
    """
    for key, only in _ONLY:
        value = model.get(key)
        if value is not None and value != only:
            raise LoadError(f"config: {key} {value!r} is not supported (only {only!r})")
    hidden, heads = _size(model, "hidden_size"), _size(model, "num_attention_heads")
    kv_heads = _size(model, "num_key_value_heads", heads)
    head_dim = _size(model, "head_dim", hidden // heads or None)
    if heads % kv_heads or head_dim % 2:
        raise LoadError(f"config: {heads} heads over {kv_heads} KV heads of {head_dim} do not divide evenly")
    theta, scaling = _rope(model)
    return LlamaConfig(
        vocab_size=_size(model, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(model, "intermediate_size"),
        layers=_size(model, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(model, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        positions_max=_size(model, "max_position_embeddings", 2048),
        tied=bool(model.get("tie_word_embeddings", False)),
    )


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a build must contain, and no other."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_rows, hidden),
            prefix + "self_attn.k_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q_rows),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes


def rope_frequencies(config: LlamaConfig) -> list[float]:
    """Inverse frequencies in radians per position, ``head_dim / 2`` of them (RoFormer, arXiv:2104.09864)."""
    plain = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    span = scaling.high_freq_factor - scaling.low_freq_factor
    scaled = []
    for frequency in plain:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        # 0 for wavelengths longer than the low cut (fully scaled), 1 for shorter than the high cut.
        smooth = min(1.0, max(0.0, (turns - scaling.low_freq_factor) / span))
        scaled.append(frequency * (smooth + (1 - smooth) / scaling.factor))
    return scaled
