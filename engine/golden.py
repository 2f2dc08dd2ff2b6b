"""The golden prompt: a few greedy tokens that tell whether a build computes what its weights say.

:func:`golden_tokens` runs the model eagerly, for a niced child process before staging; the engine then
compares its captured graphs against the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import VerifyError
from engine.loaded import LoadedBuild, load_build
from engine.padding import bucket_of, fill, logits_row
from engine.schedule import Schedule, Sequence, StepPlan
from engine.wire import Sampling

GOLDEN_TOKENS = 8
# Long enough to need two chunks of the default size, short enough for any context bucket.
_PROMPT_TOKENS = 20
# Coprime to every power of two, so the prompt visits the whole vocabulary.
_PROMPT_STRIDE = 7919


def golden_prompt(vocab_size: int, context: int) -> list[int]:
    """Fixed token ids, short enough to leave room for the answer."""
    count = max(1, min(_PROMPT_TOKENS, context - GOLDEN_TOKENS))
    return [(i + 1) * _PROMPT_STRIDE % vocab_size for i in range(count)]


def greedy(
    run: Callable[[StepPlan], torch.Tensor | None], build: LoadedBuild, *, checkpoint: Callable[[], None]
) -> tuple[int, ...]:
    """Tokens that ``run`` gives for the golden prompt, in slot 0 of an arena nobody else uses.

    Args:
        run: computes a plan, see :meth:`engine.generation.Generation.run`.
        build: whose limits and chunk size apply.
        checkpoint: called between steps.

    Raises:
        VerifyError: logits are not finite.
    """
    prompt = golden_prompt(build.config.vocab_size, build.limits.context)
    schedule = Schedule()
    sequence = Sequence(request=0, tokens=list(prompt), tokens_max=GOLDEN_TOKENS, sampling=Sampling(), seed=0)
    schedule.submit(sequence)
    schedule.admit(build.limits)
    while sequence.finish is None:
        plan = schedule.plan(0, chunk_tokens_max=build.manifest.runtime.prefill_chunk_tokens)
        assert plan is not None
        logits = run(plan)
        schedule.consume(0, plan)
        if logits is not None:
            if not bool(logits.isfinite().all()):
                raise VerifyError(f"logits of golden token {sequence.generated} are not finite")
            schedule.emit(0, int(logits[0].argmax()), build.limits)
        checkpoint()
    return tuple(sequence.tokens[len(prompt) :])


def eager_tokens(build: LoadedBuild, *, checkpoint: Callable[[], None]) -> tuple[int, ...]:
    """Golden tokens without graphs, in buffers of their own.

    Raises:
        VerifyError: logits are not finite.
    """
    arena, io = build.new_arena(), build.new_buffers()

    def run(plan: StepPlan) -> torch.Tensor | None:
        bucket = bucket_of(plan, build.manifest.runtime)
        with torch.no_grad():
            fill(io, plan, bucket, arena.shape)
            build.model.step(bucket, io, arena.data)
        rows = [logits_row(feed, plan, bucket) for feed in plan.feeds if feed.emits]
        return io.logits[rows].cpu() if rows else None

    return greedy(run, build, checkpoint=checkpoint)


def golden_tokens(folder: Path) -> list[int]:
    """Load a build on the CPU and return its golden tokens.

    Raises:
        LoadError: the build cannot be loaded.
        VerifyError: logits are not finite.
    """
    build = load_build(folder, device=torch.device("cpu"))
    return list(eager_tokens(build, checkpoint=lambda: None))
