"""Logits against transformers' LlamaForCausalLM on the same weights: whole prompt, chunks, decode, batches.

Tolerance 1e-4 absolute, on logits of magnitude 8: float32 kernels differ in the order of their sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.blocks import FIRST_BLOCK, SCRATCH_BLOCK
from engine.loaded import LoadedBuild, load_build
from engine.padding import bucket_of, fill
from engine.schedule import Feed, Sequence, StepPlan
from engine.testing import tiny_build, tiny_config
from engine.wire import Sampling

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
    """Runs plans without graphs in its own pool."""

    def __init__(self, build: LoadedBuild) -> None:
        self.build, self.pool, self.io = build, build.new_pool(), build.new_buffers()

    def run(self, *decode: Feed, chunk: Feed | None = None) -> list[torch.Tensor]:
        plan = StepPlan(decode, chunk)
        bucket = bucket_of(plan, self.build.manifest.runtime)
        with torch.no_grad():
            fill(self.io, plan, bucket, self.pool.layout.block_tokens)
            self.build.model.step(bucket, self.io, self.pool.data)
        rows = [*range(len(decode)), *([bucket.decode_rows] if chunk else [])]
        return [self.io.logits[row].clone() for row in rows]


def reference(build: LoadedBuild, config: dict[str, Any], tokens: list[int]) -> torch.Tensor:
    import transformers

    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    _, unexpected = hf.load_state_dict(dict(build.model.weights), strict=False)
    assert not unexpected
    hf.tie_weights()
    with torch.no_grad():
        logits: torch.Tensor = hf(torch.tensor([tokens])).logits[0]
    return logits


# Blocks of two sequences, deliberately out of order and interleaved.
ONE, TWO = (9, 5, 13, 7), (6, 12, 4, 10)


def feed(blocks: tuple[int, ...], tokens: list[int], start: int, count: int) -> Feed:
    sequence = Sequence(request=blocks[0], tokens=tokens, tokens_max=1, sampling=Sampling(), seed=0)
    return Feed(sequence, tuple(tokens[start : start + count]), start, blocks, emits=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    tiny_build(tmp_path / "b", seed=3, version="1.0.0", config=config)
    build = load_build(tmp_path / "b", device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    one, two = (torch.randint(0, 256, (50,), generator=generator).tolist() for _ in range(2))
    expect_one, expect_two = reference(build, config, one), reference(build, config, two)
    eager = Eager(build)

    # Chunked prefill alone, the last chunk partly filled (tokens 0..19).
    for start in (0, 8, 16):
        (got,) = eager.run(chunk=feed(ONE, one, start, min(8, 20 - start)))
    torch.testing.assert_close(got, expect_one[19], atol=TOLERANCE, rtol=0)
    # The other sequence's chunks beside decode of the first.
    for step, start in enumerate((0, 8)):
        decoded, chunked = eager.run(feed(ONE, one, 20 + step, 1), chunk=feed(TWO, two, start, 8))
        torch.testing.assert_close(decoded, expect_one[20 + step], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(chunked, expect_two[start + 7], atol=TOLERANCE, rtol=0)
    # Both decode together, across the change to the larger context bucket.
    for step in range(28):
        got_two, got_one = eager.run(feed(TWO, two, 16 + step, 1), feed(ONE, one, 22 + step, 1))
        torch.testing.assert_close(got_one, expect_one[22 + step], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(got_two, expect_two[16 + step], atol=TOLERANCE, rtol=0)


def test_padding_writes_only_to_the_scratch_block(tmp_path: Path) -> None:
    tiny_build(tmp_path / "b", seed=3, version="1.0.0")
    build = load_build(tmp_path / "b", device=torch.device("cpu"))
    eager = Eager(build)
    rows = [feed((block,), [5] * 30, 0, 1) for block in (9, 6, 4)]
    eager.run(*rows, chunk=feed((7,), [7] * 30, 0, 3))
    written = eager.pool.data.ne(0).any(-1).any(-1).any(0).any(0)
    expected = torch.zeros_like(written)
    expected[(9, 6, 4), 0] = expected[7, :3] = expected[SCRATCH_BLOCK, 0] = True
    assert torch.equal(written, expected)


def test_what_another_step_left_in_scratch_changes_nothing(tmp_path: Path) -> None:
    tiny_build(tmp_path / "b", seed=3, version="1.0.0")
    eager = Eager(load_build(tmp_path / "b", device=torch.device("cpu")))
    rows = [feed((FIRST_BLOCK + row,), [5 + row] * 30, 0, 1) for row in range(3)]
    before = eager.run(*rows)
    eager.pool.data[:, :, SCRATCH_BLOCK] = float("nan")
    for old, new in zip(before, eager.run(*rows), strict=True):
        assert torch.equal(old, new)
