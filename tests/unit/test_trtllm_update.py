"""Updates of TensorRT-LLM in place, and what holds for every update, on the stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from engine.adapters.errors import (
    BoundaryMissedError,
    EngineFailedError,
    UpdateFailedError,
    UpdateRefusedError,
)
from engine.adapters.port import Route, UpdateOptions
from engine.adapters.tensorrt_llm.signatures import ASYNC_LLM
from engine.adapters.tensorrt_llm.testing import FakePackage
from engine.adapters.tensorrt_llm.testing_bench import (
    BESIDE,
    IN_PLACE,
    Bench,
    late_request,
    play,
    request,
    rest,
    started,
    until,
)


async def refused(call: Awaitable[object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        await call


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_update_in_place_waits_for_the_running_and_holds_back_the_new(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream, first = await started(bench)
        update = asyncio.create_task(bench.adapter.update(bench.build("b"), 2, IN_PLACE))
        late = await late_request(bench)
        assert not update.done()
        assert (await bench.adapter.stats()).waiting == 1
        bench.fake.proceed()
        old = [first, *await rest(stream)]
        assert [t.token for m in old for t in m.tokens if t.token >= 0] == bench.expect("a")
        assert {m.generation for m in old} == {1}
        report = await update
        assert (report.route, report.generation, report.previous, report.rollback) == ("in_place", 2, 1, "update")
        # The same prompt again: KV blocks kept from the old weights would show.
        assert await late == (bench.expect("b"), "length", {2})
        assert len(bench.fake.live) == 1

    play(scene)


def test_auto_prefers_in_place_and_says_why_not(tmp_path: Path) -> None:
    async def scene() -> None:
        old = Bench(tmp_path, FakePackage(without={f"{ASYNC_LLM}.update_weights"}))
        await old.adapter.load(old.build("a"), 1)
        report = await old.adapter.update(old.build("b"), 2)
        assert report.route == "side_by_side"
        assert "not in_place: tensorrt_llm._torch.async_llm:AsyncLLM.update_weights is not there" in report.why
        new = Bench(tmp_path)
        await new.adapter.load(new.build("a"), 1)
        assert (await new.adapter.update(new.build("b"), 2)).route == "in_place"

    play(scene)


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_failed_update_in_place_writes_the_old_weights_back(bench: Bench, call: int) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        bench.fake.fail[f"{ASYNC_LLM}.update_weights"] = [*[None] * call, RuntimeError("bucket lost")]
        await refused(bench.adapter.update(bench.build("b"), 2, IN_PLACE), UpdateFailedError, "bucket lost")
        assert (await bench.run())[::2] == (bench.expect("a"), {1})
        await bench.adapter.update(bench.build("b"), 2, IN_PLACE)
        assert (await bench.run())[::2] == (bench.expect("b"), {2})

    play(scene)


def test_new_weights_that_do_not_answer_are_taken_back(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        bench.fake.fail[f"{ASYNC_LLM}.generate_async"] = [RuntimeError("NaN")]
        await refused(bench.adapter.update(bench.build("b"), 2, IN_PLACE), UpdateFailedError, "NaN")
        assert (await bench.run())[::2] == (bench.expect("a"), {1})

    play(scene)


def test_when_the_way_back_fails_too_nobody_is_served(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        bench.fake.fail[f"{ASYNC_LLM}.update_weights"] = [None, RuntimeError("first"), RuntimeError("second")]
        stream, _ = await started(bench)
        update = asyncio.create_task(bench.adapter.update(bench.build("b"), 2, IN_PLACE))
        late = await late_request(bench)
        bench.fake.proceed()
        await rest(stream)
        await refused(update, EngineFailedError, "first.*second.*start the engine anew")
        assert bench.digests() == ["mixture"]
        await refused(late, EngineFailedError, "second")
        await refused(bench.run(), EngineFailedError, "second")
        await refused(bench.adapter.update(bench.build("b"), 3), EngineFailedError, "second")
        await bench.adapter.close()
        assert not bench.fake.live

    play(scene)


def test_requests_that_do_not_end_stop_an_update_in_place(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream, _ = await started(bench)
        quick = UpdateOptions(route="in_place", drain_s_max=0.01)
        await refused(bench.adapter.update(bench.build("b"), 2, quick), BoundaryMissedError, "1 requests still run")
        bench.fake.proceed()
        assert (await rest(stream))[-1].tokens[-1].finish == "length"
        assert (await bench.run())[::2] == (bench.expect("a"), {1})

    play(scene)


@pytest.mark.parametrize("route", ["in_place", "side_by_side"])
def test_a_hard_stop_ends_them(bench: Bench, route: Route) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        reading = asyncio.create_task(rest(bench.adapter.generate(request(tokens_max=1_000_000))))
        await until(lambda: bench.fake.live[0].running == 1)
        report = await bench.adapter.update(
            bench.build("b"), 2, UpdateOptions(route=route, drain_s_max=0.01, hard_stop=True)
        )
        assert report.drained
        assert (await reading)[-1].tokens[-1].finish == "cancelled"
        assert (await bench.run())[::2] == (bench.expect("b"), {2})
        assert len(bench.fake.live) == 1

    play(scene)


def test_every_running_request_is_waited_for(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        first, second = (bench.adapter.generate(request(number)) for number in (1, 2))
        await anext(first)
        await anext(second)
        await rest(first)
        quick = UpdateOptions(route="in_place", drain_s_max=0.01)
        await refused(bench.adapter.update(bench.build("b"), 2, quick), BoundaryMissedError, "1 requests still run")
        assert (await rest(second))[-1].tokens[-1].finish == "length"

    play(scene)


def test_one_change_at_a_time(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        both = await asyncio.gather(
            *(bench.adapter.update(bench.build(weights), 2, BESIDE) for weights in "bc"), return_exceptions=True
        )
        assert isinstance(both[1], UpdateRefusedError)
        assert "under way" in str(both[1])
        assert (await bench.run())[0] == bench.expect("b")

    play(scene)


@pytest.mark.parametrize(
    ("options", "point"),
    [(IN_PLACE, f"{ASYNC_LLM}.update_weights"), (BESIDE, ASYNC_LLM)],
    ids=["in_place", "side_by_side"],
)
def test_a_caller_who_leaves_does_not_leave_half_an_update(bench: Bench, options: UpdateOptions, point: str) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        update = asyncio.create_task(bench.adapter.update(bench.build("b"), 2, options))
        loop = asyncio.get_running_loop()
        bench.fake.at[point] = lambda: loop.call_soon_threadsafe(update.cancel)
        await asyncio.wait([update])
        assert update.cancelled()
        await until(lambda: not bench.adapter._busy)
        assert (await bench.run())[::2] == (bench.expect("b"), {2})
        assert len(bench.fake.live) == 1

    play(scene)


def test_fifty_updates_leave_one_engine(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        for generation in range(2, 52):
            weights = "ab"[generation % 2]
            route = (IN_PLACE, BESIDE)[generation // 2 % 2]
            await bench.adapter.update(bench.build(weights), generation, route)
            assert (await bench.run())[::2] == (bench.expect(weights), {generation})
        assert len(bench.fake.live) == 1
        assert not bench.adapter._tasks

    play(scene)
