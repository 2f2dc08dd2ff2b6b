"""Arm: the matrix products of one decode step and nothing else, the time no engine on this machine can go below."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.arms import answer_with

_REPEATS = 5


def linear_shapes(config: dict[str, int]) -> list[tuple[int, int]]:
    """(outputs, inputs) of each product of a Llama step, with q, k, v and gate, up joined."""
    hidden, ffn, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv = kv_heads * config.get("head_dim", hidden // heads)
    layer: list[tuple[int, int]] = [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)]
    return layer * layers + [(config["vocab_size"], hidden)]


def main() -> None:
    """Answer with milliseconds a step, the best of a few."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    shapes = linear_shapes(json.loads(Path(sys.argv[1], "config.json").read_bytes()))
    weights = [torch.randn(shape) for shape in shapes]

    def step(rows: int) -> dict[str, Any]:
        inputs = {width: torch.randn(rows, width) for _, width in shapes}
        times = []
        for _ in range(_REPEATS):
            began_ns = time.perf_counter_ns()
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            times.append((time.perf_counter_ns() - began_ns) / 1e6)
        return {"ms": min(times)}

    answer_with(step)


if __name__ == "__main__":
    main()
