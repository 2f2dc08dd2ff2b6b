"""The KV arena: keys and values of every running sequence, at fixed addresses.

An arena outlives generations: one that carries KV over captures its graphs against the arena in use.
It has one slot more than sequences can run. Padded rows write to that scratch slot, so a graph that is
wider than the step needs can never touch a live sequence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json

import torch

from engine.llama import LlamaConfig

KEYS, VALUES = 0, 1
_LAYOUT = "layer,kv,slot,token,head,dim"
_serials = itertools.count(1)


@dataclasses.dataclass(frozen=True, slots=True)
class KvShape:
    """Size of an arena: ``slots`` sequences (without the scratch slot) of up to ``tokens`` tokens."""

    slots: int
    tokens: int


def kv_signature(config: LlamaConfig, shape: KvShape, dtype: str) -> str:
    """``sha256:<hex>`` of everything but the weights that decides what KV a token leaves, and where.

    The whole configuration counts: keys depend on the rotary base and head counts directly, and on
    every other field through the layers below.
    """
    facts = {
        "config": dataclasses.asdict(config),
        "dtype": dtype,
        "layout": _LAYOUT,
        "shape": dataclasses.asdict(shape),
    }
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class KvArena:
    """KV storage, zeroed.

    Attributes:
        data: ``[layers, 2, slots + 1, tokens, kv_heads, head_dim]``; one allocation, so that freeing it
            returns its pages to the system at once.
        serial: unique in the process; sequences count their cached tokens per serial.
    """

    __slots__ = ("data", "serial", "shape")

    def __init__(self, config: LlamaConfig, shape: KvShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.serial = next(_serials)
        self.data = torch.zeros(
            (config.layers, 2, shape.slots + 1, shape.tokens, config.kv_heads, config.head_dim),
            dtype=dtype,
            device=device,
        )

    @property
    def size_bytes(self) -> int:
        """Reserved bytes."""
        return self.data.nbytes

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` positions of slot ``source`` to slot ``target``."""
        self.data[:, :, target, :tokens].copy_(self.data[:, :, source, :tokens])

    def clear(self, slot: int) -> None:
        """Zero a slot. Needed after non-finite values: masked attention still multiplies them by 0, giving NaN."""
        self.data[:, :, slot].zero_()
