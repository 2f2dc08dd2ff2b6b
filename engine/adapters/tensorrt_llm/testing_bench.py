"""An adapter on the stand-in with builds for it, and what tests of it do with time and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.adapters.port import UpdateOptions
from engine.adapters.tensorrt_llm.adapter import TensorRtLlm
from engine.adapters.tensorrt_llm.gate import Gate
from engine.adapters.tensorrt_llm.loading import LoadOptions
from engine.adapters.tensorrt_llm.testing import FakePackage, FakeWeights, fake_token
from engine.adapters.tensorrt_llm.testing_builds import write_checkpoint, write_engine_set
from engine.wire import Sampling, Submit, Tokens

PROMPT = (3, 1, 4)
BESIDE = UpdateOptions(route="side_by_side")
IN_PLACE = UpdateOptions(route="in_place")


def request(number: int = 1, tokens_max: int = 4, prompt: tuple[int, ...] = PROMPT) -> Submit:
    """A greedy request."""
    return Submit(request=number, prompt=prompt, tokens_max=tokens_max, sampling=Sampling())


@dataclass
class Bench:
    """An adapter on a stand-in, and builds for it."""

    root: Path
    fake: FakePackage = field(default_factory=FakePackage)
    options: LoadOptions = field(default_factory=LoadOptions)
    checkpoint: bool = True

    def __post_init__(self) -> None:
        self.adapter = TensorRtLlm(self.options, importer=self.fake.importer, weights=FakeWeights())

    @property
    def gate(self) -> Gate:
        """Where requests wait."""
        return self.adapter._gate  # noqa: SLF001 - the port has no way to see that one change has begun

    def build(self, weights: str, **how: Any) -> Path:
        """The build of that name, written at the first call."""
        folder = self.root / weights
        if not folder.exists():
            (write_checkpoint if self.checkpoint else write_engine_set)(folder, weights=weights, **how)
        return folder

    async def run(self, **how: Any) -> tuple[list[int], str | None, set[int]]:
        """Tokens, finish and generations of one whole request."""
        tokens, finish, generations = [], None, set()
        async for message in self.adapter.generate(request(**how)):
            generations.add(message.generation)
            for token in message.tokens:
                finish = token.finish or finish
                tokens += [token.token] if token.token >= 0 else []
        return tokens, finish, generations

    def expect(self, weights: str, count: int = 4, prompt: tuple[int, ...] = PROMPT) -> list[int]:
        """What a fresh engine on these weights says."""
        fresh = FakePackage()
        engine = fresh.importer("tensorrt_llm").LLM(model=str(self.build(weights)), skip_tokenizer_init=True)
        return [fake_token(engine.state.digest, prompt, at) for at in range(count)]

    def digests(self) -> list[str]:
        """Weights of the engines in memory."""
        return [engine.digest for engine in self.fake.live]


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scene, which has 30 s."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(bounded())


async def until(what: Callable[[], bool]) -> None:
    """Let others run until it is so; the scene's own deadline ends a wait that would last for ever."""
    while not what():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


async def started(bench: Bench, **how: Any) -> tuple[AsyncGenerator[Tokens], Tokens]:
    """A request that has its first token and gets no other for now."""
    stream = bench.adapter.generate(request(**how))
    first = await anext(stream)
    bench.fake.hold()
    return stream, first


async def late_request(bench: Bench) -> asyncio.Task[tuple[list[int], str | None, set[int]]]:
    """A request that comes while the gate is closed, and waits there."""
    await until(lambda: bench.gate.closed)
    late = asyncio.create_task(bench.run(number=2))
    await until(lambda: bench.gate.waiting == 1)
    return late


async def rest(stream: AsyncIterator[Tokens]) -> list[Tokens]:
    """Everything that is still to come."""
    return [message async for message in stream]
