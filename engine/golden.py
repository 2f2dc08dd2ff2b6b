"""The golden prompt: a few greedy tokens that tell whether a build computes what its weights say.

:func:`golden_tokens` runs the model eagerly, for a niced child process before staging; the engine then
compares its captured graphs against the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engine.blocks import BlockPool
from engine.errors import VerifyError
from engine.kv import GOLDEN_SPAN_TOKENS, KvPool
from engine.loaded import LoadedBuild, load_build
from engine.padding import bucket_of, fill, logits_rows
from engine.schedule import Schedule, Sequence, StepPlan
from engine.table import KvSpace
from engine.wire import Sampling

GOLDEN_TOKENS = 8
# Long enough to need two chunks of the default size, short enough for any context bucket.
_PROMPT_TOKENS = GOLDEN_SPAN_TOKENS - GOLDEN_TOKENS
# Coprime to every power of two, so the prompt visits the whole vocabulary.
_PROMPT_STRIDE = 7919


def golden_prompt(vocab_size: int, context: int) -> list[int]:
    """Fixed token ids, short enough to leave room for the answer."""
    count = max(1, min(_PROMPT_TOKENS, context - GOLDEN_TOKENS))
    return [(i + 1) * _PROMPT_STRIDE % vocab_size for i in range(count)]


def greedy(
    run: Callable[[StepPlan], torch.Tensor | None],
    build: LoadedBuild,
    pool: KvPool,
    *,
    checkpoint: Callable[[], None],
) -> tuple[int, ...]:
    """Tokens that ``run`` gives for the golden prompt, in the pool's golden blocks, which no sequence uses.

    Args:
        run: computes a plan, see :meth:`engine.generation.Generation.run`.
        build: whose limits and chunk size apply.
        pool: where ``run`` keeps KV.
        checkpoint: called between steps.

    Raises:
        VerifyError: logits are not finite.
    """
    prompt = golden_prompt(build.config.vocab_size, build.limits.context)
    schedule, space = Schedule(), KvSpace(0, BlockPool(pool.golden, pool.layout.block_tokens))
    sequence = Sequence(request=0, tokens=list(prompt), tokens_max=GOLDEN_TOKENS, sampling=Sampling(), seed=0)
    schedule.submit(sequence)
    schedule.admit(build.limits, space)
    while sequence.finish is None:
        plan = schedule.plan(space, chunk_tokens_max=build.manifest.runtime.prefill_chunk_tokens)
        assert plan is not None
        logits = run(plan)
        schedule.consume(space.generation, plan)
        if logits is not None:
            if not bool(logits.isfinite().all()):
                raise VerifyError(f"logits of golden token {sequence.generated} are not finite")
            schedule.emit(sequence, int(logits[0].argmax()), build.limits)
        checkpoint()
    return tuple(sequence.tokens[len(prompt) :])


def eager_tokens(build: LoadedBuild, pool: KvPool, *, checkpoint: Callable[[], None]) -> tuple[int, ...]:
    """Golden tokens without graphs, in buffers of their own and the golden blocks of ``pool``.

    Raises:
        VerifyError: logits are not finite.
    """
    io = build.new_buffers()

    def run(plan: StepPlan) -> torch.Tensor | None:
        bucket = bucket_of(plan, build.manifest.runtime)
        with torch.no_grad():
            pool.clear(plan.fresh)
            fill(io, plan, bucket, pool.layout.block_tokens)
            build.model.step(bucket, io, pool.data)
        rows = logits_rows(plan, bucket)
        return io.logits[rows].cpu() if rows else None

    return greedy(run, build, pool, checkpoint=checkpoint)


def golden_tokens(folder: Path) -> list[int]:
    """Load a build on the CPU and return its golden tokens.

    Raises:
        LoadError: the build cannot be loaded.
        VerifyError: logits are not finite.
    """
    build = load_build(folder, device=torch.device("cpu"))
    return list(eager_tokens(build, build.golden_pool(), checkpoint=lambda: None))
