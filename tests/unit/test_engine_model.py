"""Logits against transformers' LlamaForCausalLM on the same weights: whole prompt, chunks, decode, batches.

Tolerance 1e-4 absolute, on logits of magnitude 8: float32 kernels differ in the order of their sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loaded import LoadedBuild, load_build
from engine.padding import bucket_of, fill, logits_row
from engine.schedule import Feed, StepPlan
from engine.testing import tiny_build, tiny_config

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "tied": tiny_config(),
    "untied": tiny_config(layers=3, hidden=96, tied=False),
    "llama3": tiny_config() | {"rope_scaling": LLAMA3},
}


class Eager:
    """Runs plans without graphs in its own arena."""

    def __init__(self, build: LoadedBuild) -> None:
        self.build, self.arena, self.io = build, build.new_arena(), build.new_buffers()

    def run(self, *decode: Feed, chunk: Feed | None = None) -> list[torch.Tensor]:
        plan = StepPlan(decode, chunk)
        bucket = bucket_of(plan, self.build.manifest.runtime)
        with torch.no_grad():
            fill(self.io, plan, bucket, self.arena.shape)
            self.build.model.step(bucket, self.io, self.arena.data)
        return [self.io.logits[logits_row(feed, plan, bucket)].clone() for feed in plan.feeds]


def reference(build: LoadedBuild, config: dict[str, Any], tokens: list[int]) -> torch.Tensor:
    import transformers

    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    _, unexpected = hf.load_state_dict(dict(build.model.weights), strict=False)
    assert not unexpected
    hf.tie_weights()
    with torch.no_grad():
        logits: torch.Tensor = hf(torch.tensor([tokens])).logits[0]
    return logits


def feed(slot: int, tokens: list[int], start: int, count: int) -> Feed:
    return Feed(slot, tuple(tokens[start : start + count]), start, emits=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    tiny_build(tmp_path / "b", seed=3, version="1.0.0", config=config)
    build = load_build(tmp_path / "b", device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    one, two = (torch.randint(0, 256, (50,), generator=generator).tolist() for _ in range(2))
    expect_one, expect_two = reference(build, config, one), reference(build, config, two)
    eager = Eager(build)

    # Chunked prefill into slot 2 alone, the last chunk partly filled (tokens 0..19).
    for start in (0, 8, 16):
        (got,) = eager.run(chunk=feed(2, one, start, min(8, 20 - start)))
    torch.testing.assert_close(got, expect_one[19], atol=TOLERANCE, rtol=0)
    # The other sequence's chunks into slot 0, beside decode of slot 2 (rows 0 and 1 are padding).
    for step, start in enumerate((0, 8)):
        decoded, chunked = eager.run(feed(2, one, 20 + step, 1), chunk=feed(0, two, start, 8))
        torch.testing.assert_close(decoded, expect_one[20 + step], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(chunked, expect_two[start + 7], atol=TOLERANCE, rtol=0)
    # Both decode together, across the change to the larger context bucket.
    for step in range(28):
        got_two, got_one = eager.run(feed(0, two, 16 + step, 1), feed(2, one, 22 + step, 1))
        torch.testing.assert_close(got_one, expect_one[22 + step], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(got_two, expect_two[16 + step], atol=TOLERANCE, rtol=0)


def test_padding_writes_only_to_the_scratch_slot(tmp_path: Path) -> None:
    tiny_build(tmp_path / "b", seed=3, version="1.0.0")
    build = load_build(tmp_path / "b", device=torch.device("cpu"))
    eager = Eager(build)
    eager.run(feed(2, [5] * 30, 0, 1), chunk=feed(1, [7] * 30, 0, 3))
    written = eager.arena.data.ne(0).any(-1).any(-1).any(0).any(0)
    expected = torch.zeros_like(written)
    expected[2, 0] = expected[1, :3] = True
    assert torch.equal(written[:-1], expected[:-1])
    assert written[-1].tolist() == [True] + [False] * 63
