"""What every external engine must do, on the stand-in and, where there is one, on the real TensorRT-LLM.

For the real one set ``PATCHCTL_TRTLLM_BUILDS`` to two builds of kind ``tensorrt_llm`` of one model, separated by ``:``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.adapters.errors import EngineFailedError, UpdateRefusedError
from engine.adapters.port import ExternalEngine, UpdateOptions
from engine.adapters.tensorrt_llm.adapter import TensorRtLlm
from engine.adapters.tensorrt_llm.loading import LoadOptions
from engine.adapters.tensorrt_llm.testing import FakePackage, FakeWeights
from engine.adapters.tensorrt_llm.testing_builds import write_checkpoint, write_engine_set
from engine.wire import Sampling, Submit

BUILDS = os.environ.get("PATCHCTL_TRTLLM_BUILDS", "")
REAL = pytest.param(
    "real",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            importlib.util.find_spec("tensorrt_llm") is None or not BUILDS,
            reason="no tensorrt_llm, or PATCHCTL_TRTLLM_BUILDS is not set: not run on a GPU",
        ),
    ],
)
# Loading a real engine takes minutes; the stand-in takes none.
SCENE_S_MAX = 1800.0 if BUILDS else 30.0


@dataclass(frozen=True, slots=True)
class Rig:
    engine: ExternalEngine
    old: Path
    new: Path


@pytest.fixture(params=["engine set", "checkpoint", "checkpoint, plain LLM", REAL])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    if request.param == "real":
        old, new = map(Path, BUILDS.split(":"))
        yield Rig(TensorRtLlm(), old, new)
        return
    write = write_engine_set if request.param == "engine set" else write_checkpoint
    for weights in "ab":
        write(tmp_path / weights, weights=weights)
    options = LoadOptions(asynchronous=request.param == "checkpoint")
    fake = FakePackage()
    yield Rig(TensorRtLlm(options, importer=fake.importer, weights=FakeWeights()), tmp_path / "a", tmp_path / "b")
    assert not fake.live


def play(rig: Rig, scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def closing() -> None:
        try:
            async with asyncio.timeout(SCENE_S_MAX):
                await scene()
        finally:
            await rig.engine.close()

    asyncio.run(closing())


async def tokens(engine: ExternalEngine, tokens_max: int = 8) -> tuple[list[int], set[int], str | None]:
    """Tokens, generations and finish of a greedy request."""
    got: list[int] = []
    generations, finish = set(), None
    request = Submit(request=1, prompt=(9, 8, 7), tokens_max=tokens_max, sampling=Sampling())
    async for message in engine.generate(request):
        generations.add(message.generation)
        for token in message.tokens:
            assert finish is None, "nothing follows a finish"
            assert token.request == 1
            finish = token.finish
            got += [token.token] if token.token >= 0 else []
    return got, generations, finish


def test_serves_after_load_and_not_before(rig: Rig) -> None:
    async def scene() -> None:
        seen = [rig.engine.generation]
        await rig.engine.load(rig.old, 1)
        seen.append(rig.engine.generation)
        assert seen == [None, 1]
        got, generations, finish = await tokens(rig.engine)
        assert (len(got), generations, finish) == (8, {1}, "length")

    play(rig, scene)


def test_greedy_answers_repeat(rig: Rig) -> None:
    async def scene() -> None:
        await rig.engine.load(rig.old, 1)
        assert await tokens(rig.engine) == await tokens(rig.engine)

    play(rig, scene)


def test_many_requests_at_once(rig: Rig) -> None:
    async def scene() -> None:
        await rig.engine.load(rig.old, 1)
        alone = await tokens(rig.engine)
        assert await asyncio.gather(*(tokens(rig.engine) for _ in range(8))) == [alone] * 8

    play(rig, scene)


def test_an_update_and_the_way_back(rig: Rig) -> None:
    async def scene() -> None:
        await rig.engine.load(rig.old, 1)
        before = (await tokens(rig.engine))[0]
        report = await rig.engine.update(rig.new, 2)
        assert (report.generation, report.previous, rig.engine.generation) == (2, 1, 2)
        after = await tokens(rig.engine)
        assert after[1] == {2}
        await rig.engine.update(rig.old, 3)
        assert (await tokens(rig.engine))[::2] == (before, "length")

    play(rig, scene)


def test_requests_across_an_update_end_on_the_generation_they_began_on(rig: Rig) -> None:
    async def scene() -> None:
        await rig.engine.load(rig.old, 1)
        running = [asyncio.create_task(tokens(rig.engine, 32)) for _ in range(4)]
        await asyncio.sleep(0)
        update = asyncio.create_task(rig.engine.update(rig.new, 2))
        later = [asyncio.create_task(tokens(rig.engine, 32)) for _ in range(4)]
        for got, generations, finish in await asyncio.gather(*running, *later):
            assert (len(got), len(generations), finish) == (32, 1, "length")
        await update
        assert (await tokens(rig.engine))[1] == {2}

    play(rig, scene)


def test_a_kept_generation_comes_back_by_exchange(rig: Rig) -> None:
    async def scene() -> None:
        await rig.engine.load(rig.old, 1)
        before = (await tokens(rig.engine))[0]
        report = await rig.engine.update(rig.new, 2, UpdateOptions(route="side_by_side", keep_old=True))
        assert report.rollback == "exchange"
        await rig.engine.exchange(1)
        assert (await tokens(rig.engine))[:2] == (before, {1})
        await rig.engine.release(2)
        with pytest.raises(UpdateRefusedError):
            await rig.engine.exchange(2)

    play(rig, scene)


def test_a_client_who_leaves_is_not_counted_any_more(rig: Rig) -> None:
    async def scene() -> None:
        await rig.engine.load(rig.old, 1)
        request = Submit(request=1, prompt=(1,), tokens_max=100, sampling=Sampling())
        stream = rig.engine.generate(request)
        await anext(stream)
        assert (await rig.engine.stats()).running == 1
        await stream.aclose()
        assert (await rig.engine.stats()).running == 0

    play(rig, scene)


def test_reclaim_is_done_or_says_why_not(rig: Rig) -> None:
    async def scene() -> None:
        await rig.engine.load(rig.old, 1)
        before = await tokens(rig.engine)
        report = await rig.engine.reclaim()
        assert report.done != bool(report.why)
        assert not report.parked
        assert await tokens(rig.engine) == before

    play(rig, scene)


def test_a_closed_engine_refuses(rig: Rig) -> None:
    async def scene() -> None:
        await rig.engine.load(rig.old, 1)
        await rig.engine.close()
        with pytest.raises(EngineFailedError):
            await tokens(rig.engine)

    play(rig, scene)
