"""A GGUF file of a Llama-family model, seen as a Hugging Face checkpoint.

Sources: the GGUF specification (ggml ``docs/gguf.md``) for the fields, and llama.cpp's
``convert_hf_to_gguf.py`` for what its converter does to a Hugging Face checkpoint and we undo.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.models.safetensors_stream import FloatTensor

if TYPE_CHECKING:
    from gguf import ReaderTensor

# Rows dequantised at a time: 4096 rows of 576 float32 are 9 MiB; the whole embedding would be 108.
_BLOCK_ROWS = 4096
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class GgufUnsupportedError(ValueError):
    """The file is not a GGUF of the kind we convert."""


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor.

    Raises:
        GgufUnsupportedError: not a tensor of a plain Llama model.
    """
    if name in _WHOLE:
        return _WHOLE[name]
    part, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    if part == "blk" and layer.isdecimal() and rest in _LAYER:
        return f"model.layers.{int(layer)}.{_LAYER[rest]}"
    raise GgufUnsupportedError(f"tensor {name!r} is not one of a Llama model")


def rotary_rows(rows: int, heads: int) -> NDArray[np.intp]:
    """Row order that turns GGUF's interleaved rotary pairs back into Hugging Face's two halves.

    Row ``2 * i + half`` of a head in the file is row ``half * head_dim / 2 + i`` of the checkpoint.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


class GgufLlama:
    """Reads ``path``; tensor data stays mapped and is dequantised only while it is iterated.

    Raises:
        GgufUnsupportedError: not a Llama, or a field is missing.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        if self.field("general.architecture") != "llama":
            raise GgufUnsupportedError(f"architecture is {self.field('general.architecture')!r}, not 'llama'")

    def field(self, key: str) -> Any:
        """Value of a metadata field.

        Raises:
            GgufUnsupportedError: there is none of that name.
        """
        field = self._reader.fields.get(key)
        if field is None:
            raise GgufUnsupportedError(f"field {key!r} is missing")
        return field.contents()

    def config(self) -> dict[str, Any]:
        """``config.json`` of the model."""
        names = {tensor.name for tensor in self._reader.tensors}
        hidden, heads = self.field("llama.embedding_length"), self.field("llama.attention.head_count")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self.field("llama.feed_forward_length"),
            "max_position_embeddings": self.field("llama.context_length"),
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": self.field("llama.block_count"),
            "num_key_value_heads": self.field("llama.attention.head_count_kv"),
            # Stored as float32; str() of that is the shortest text that reads back as the same number (1e-05).
            "rms_norm_eps": float(str(np.float32(self.field("llama.attention.layer_norm_rms_epsilon")))),
            "rope_scaling": None,
            "rope_theta": self.field("llama.rope.freq_base"),
            "tie_word_embeddings": "output.weight" not in names,
            "torch_dtype": "float32",
            "vocab_size": self.field("llama.vocab_size"),
        }

    def tensors(self) -> list[FloatTensor]:
        """Every tensor under its Hugging Face name, as float32, in the file's order."""
        heads = {
            "attn_q.weight": self.field("llama.attention.head_count"),
            "attn_k.weight": self.field("llama.attention.head_count_kv"),
        }
        found = []
        for tensor in self._reader.tensors:
            # GGUF lists the fastest dimension first; numpy and safetensors list it last.
            shape = tuple(int(size) for size in reversed(tensor.shape))
            rotary = heads.get(".".join(tensor.name.split(".")[-2:]))
            order = None if rotary is None else rotary_rows(shape[0], rotary)
            found.append(FloatTensor(hf_name(tensor.name), shape, _blocks(tensor, order)))
        return found


def _blocks(tensor: ReaderTensor, order: NDArray[np.intp] | None) -> Iterator[NDArray[np.float32]]:
    """Rows of ``tensor``, dequantised to float32, in ``order``."""
    from gguf import dequantize

    if tensor.data.ndim == 1:
        yield dequantize(tensor.data, tensor.tensor_type)
        return
    for start in range(0, len(tensor.data), _BLOCK_ROWS):
        stop = start + _BLOCK_ROWS
        rows = tensor.data[start:stop] if order is None else tensor.data[order[start:stop]]
        yield dequantize(rows, tensor.tensor_type)
