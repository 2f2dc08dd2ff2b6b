"""Arm: transformers' ``generate`` on the same folder, greedy, float32, one thread, its defaults otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.arms import answer_with


class _Stamps:
    """A stopping criterion that never stops: called after every token, it notes when that was."""

    def __init__(self) -> None:
        self.at_ns: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.at_ns.append(time.monotonic_ns())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    """Answer with the arrivals of each token, the same for all rows, and the CPU time of the whole call."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()

    def volley(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        stamps = _Stamps()
        inputs = torch.tensor(prompts)
        began_cpu_s = time.process_time()
        began_ns = time.monotonic_ns()
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=[stamps],
        )
        cpu_ms = (time.process_time() - began_cpu_s) * 1e3
        return {"began_ns": began_ns, "arrivals_ns": [stamps.at_ns] * len(prompts), "cpu_ms": cpu_ms}

    answer_with(volley)


if __name__ == "__main__":
    main()
