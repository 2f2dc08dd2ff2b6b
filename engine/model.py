"""The Llama forward pass for one bucket, reading and writing static buffers only.

One call serves both phases: the linear layers run on all rows together (on a CPU 20 rows cost far less
than five times 4 rows), attention runs once for the decode rows and once for the prefill rows.
Architecture: Llama 2 (arXiv:2307.09288); the tests compare logits with transformers' implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.blocks import blocks_for
from engine.bucket import Bucket
from engine.kv import KEYS, VALUES
from engine.llama import LlamaConfig, rope_frequencies

TOKENS, POSITIONS, CELLS = 0, 1, 2
# The GEMM of the CPU's BLAS is made for many columns: with this many rows or fewer, swapping the operands
# takes 48 ms instead of 71 for the linears of a 4-row step (SmolLM2-135M, one core of an EPYC with AVX2).
_FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Inputs and outputs of every bucket of one generation, at fixed addresses.

    Attributes:
        rows: int64 ``[3, rows_max]``: token, position and KV cell of each row, decode rows first. A cell is
            block times block size plus offset.
        tables: int64 ``[batch_max + 1, blocks_max]``: KV blocks of each decode row, last of the chunk.
        last: int64 ``[1]``: the chunk's row whose logits are wanted.
        logits: float32 ``[batch_max + 1, vocab_size]``: decode rows, then the prefilled sequence.
    """

    rows: torch.Tensor
    tables: torch.Tensor
    last: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def allocate(
        cls, *, rows_max: int, batch_max: int, blocks_max: int, vocab_size: int, device: torch.device
    ) -> StepBuffers:
        """Zeroed buffers."""
        return cls(
            rows=torch.zeros((3, rows_max), dtype=torch.int64, device=device),
            tables=torch.zeros((batch_max + 1, blocks_max), dtype=torch.int64, device=device),
            last=torch.zeros(1, dtype=torch.int64, device=device),
            logits=torch.zeros((batch_max + 1, vocab_size), dtype=torch.float32, device=device),
        )


class Llama:
    """Weights and rotary tables of one build; :meth:`step` is what gets captured."""

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, torch.Tensor], *, context_max: int, block_tokens: int
    ) -> None:
        self.config = config
        self.weights = weights
        embedding = weights["model.embed_tokens.weight"]
        self._embedding = embedding
        self._head = embedding if config.tied else weights["lm_head.weight"]
        self._layers = [_Layer.of(weights, layer) for layer in range(config.layers)]
        self._block_tokens = block_tokens
        reach = blocks_for(context_max, block_tokens) * block_tokens
        self._positions = torch.arange(reach, device=embedding.device)
        # Angles in float32 whatever the compute dtype, as transformers does: bfloat16 cannot count to 512.
        frequencies = torch.tensor(rope_frequencies(config), dtype=torch.float32)
        angles = torch.outer(torch.arange(context_max, dtype=torch.float32), frequencies)
        self._cos = angles.cos().to(embedding)
        self._sin = angles.sin().to(embedding)

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """What :meth:`step` reads besides the weights: computed from the configuration, never written."""
        return {"buffers.positions": self._positions, "buffers.rope_cos": self._cos, "buffers.rope_sin": self._sin}

    def step(self, bucket: Bucket, io: StepBuffers, kv: torch.Tensor) -> None:
        """Run one step: read ``io``, extend ``kv`` in place, write ``io.logits``.

        Args:
            bucket: the step's shape.
            io: static buffers; the first ``bucket.rows`` rows are used.
            kv: a pool's ``data``.
        """
        config, decode = self.config, bucket.decode_rows
        tokens, positions, cells = io.rows[:, : bucket.rows].unbind(0)
        span = blocks_for(bucket.context, self._block_tokens)
        tables = io.tables[:decode, :span].reshape(-1), io.tables[-1, :span]
        cos = self._cos.index_select(0, positions).unsqueeze(1)
        sin = self._sin.index_select(0, positions).unsqueeze(1)
        future = self._positions[: span * self._block_tokens] > positions.unsqueeze(1)
        mask = torch.zeros(future.shape, dtype=kv.dtype, device=kv.device).masked_fill(future, float("-inf"))
        x = functional.embedding(tokens, self._embedding)
        for number, layer in enumerate(self._layers):
            h = self._norm(x, layer.attention_norm)
            # Queries and keys turn by the same angles: one rotation for both.
            qk = torch.cat((_linear(h, layer.q), _linear(h, layer.k)), dim=1)
            qk = _rotate(qk.view(bucket.rows, -1, config.head_dim), cos, sin)
            q, k = qk[:, : config.heads], qk[:, config.heads :]
            v = _linear(h, layer.v).reshape(bucket.rows, config.kv_heads, config.head_dim)
            keys, values = kv[number, KEYS], kv[number, VALUES]
            keys.flatten(0, 1).index_copy_(0, cells, k)
            values.flatten(0, 1).index_copy_(0, cells, v)
            parts = []
            if decode:
                parts.append(self._decode(q[:decode], keys, values, tables[0], mask[:decode]))
            if bucket.prefill_rows:
                parts.append(self._prefill(q[decode:], keys, values, tables[1], mask[decode:]))
            x = x + _linear(torch.cat(parts) if len(parts) > 1 else parts[0], layer.o)
            h = self._norm(x, layer.ffn_norm)
            h = functional.silu(_linear(h, layer.gate)) * _linear(h, layer.up)
            x = x + _linear(h, layer.down)
        if bucket.prefill_rows:
            last = x.index_select(0, io.last)
            x = torch.cat((x[:decode], last)) if decode else last
        x = self._norm(x, self.weights["model.norm.weight"])
        io.logits[: bucket.logits_rows].copy_(_linear(x, self._head))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention of row i over its own blocks. Grouped heads become query rows: no copy of the KV per head."""
        rows, context = mask.shape
        shape = (rows, context, self.config.kv_heads, self.config.head_dim)
        out = functional.scaled_dot_product_attention(
            q.reshape(rows, self.config.kv_heads, -1, self.config.head_dim),
            keys.index_select(0, table).view(shape).transpose(1, 2),
            values.index_select(0, table).view(shape).transpose(1, 2),
            attn_mask=mask.view(rows, 1, 1, context),
        )
        return out.reshape(rows, -1)

    def _prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of all rows over one sequence's blocks."""
        config, (rows, context) = self.config, mask.shape
        groups = config.heads // config.kv_heads
        shape = (1, context, config.kv_heads, config.head_dim)
        grouped = q.reshape(rows, config.kv_heads, groups, config.head_dim).permute(1, 2, 0, 3)
        out = functional.scaled_dot_product_attention(
            grouped.reshape(1, config.kv_heads, groups * rows, config.head_dim),
            keys.index_select(0, table).view(shape).transpose(1, 2),
            values.index_select(0, table).view(shape).transpose(1, 2),
            attn_mask=mask.repeat(groups, 1).view(1, 1, groups * rows, context),
        )
        return out.view(config.kv_heads, groups, rows, -1).permute(2, 0, 1, 3).reshape(rows, -1)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    ffn_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], layer: int) -> _Layer:
        prefix = f"model.layers.{layer}."
        return cls(
            attention_norm=weights[prefix + "input_layernorm.weight"],
            q=weights[prefix + "self_attn.q_proj.weight"],
            k=weights[prefix + "self_attn.k_proj.weight"],
            v=weights[prefix + "self_attn.v_proj.weight"],
            o=weights[prefix + "self_attn.o_proj.weight"],
            ffn_norm=weights[prefix + "post_attention_layernorm.weight"],
            gate=weights[prefix + "mlp.gate_proj.weight"],
            up=weights[prefix + "mlp.up_proj.weight"],
            down=weights[prefix + "mlp.down_proj.weight"],
        )


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T``; x ``[rows, in]``, weight ``[out, in]``."""
    if x.device.type == "cpu" and 1 < x.shape[0] <= _FEW_ROWS:
        # Rows must be contiguous: with columns contiguous the same product takes four times as long.
        return torch.mm(weight, x.contiguous().t()).t()
    return functional.linear(x, weight)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split layout (transformers' ``apply_rotary_pos_emb``); x ``[rows, heads, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
