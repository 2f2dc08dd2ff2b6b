"""Updates of TensorRT-LLM beside the old engine, on the stand-in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest

from engine.adapters.errors import (
    UpdateFailedError,
    UpdateRefusedError,
)
from engine.adapters.port import UpdateOptions
from engine.adapters.tensorrt_llm.memory import GIB
from engine.adapters.tensorrt_llm.signatures import ASYNC_LLM
from engine.adapters.tensorrt_llm.testing_bench import (
    BESIDE,
    IN_PLACE,
    Bench,
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


def test_an_update_beside_holds_back_nobody(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream, first = await started(bench)
        bench.fake.proceed()
        update = asyncio.create_task(bench.adapter.update(bench.build("b"), 2, BESIDE))
        await until(lambda: bench.adapter.generation == 2)
        assert (await bench.run(number=2))[::2] == (bench.expect("b"), {2})
        old = [first, *await rest(stream)]
        assert [t.token for m in old for t in m.tokens if t.token >= 0] == bench.expect("a")
        report = await update
        assert (report.route, report.drained, report.rollback) == ("side_by_side", True, "update")
        assert len(bench.fake.live) == 1

    play(scene)


def test_an_engine_set_is_only_updated_beside(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path, checkpoint=False)
        await bench.adapter.load(bench.build("a", world_size=2), 1)
        await refused(
            bench.adapter.update(bench.build("b", world_size=2), 2, IN_PLACE), UpdateRefusedError, "part of its plan"
        )
        assert (await bench.adapter.update(bench.build("b", world_size=2), 2)).route == "side_by_side"
        assert [args.keys() & {"tensor_parallel_size"} for args in bench.fake.arguments] == [set(), set()]
        report = await bench.adapter.reclaim()
        assert (report.done, report.why) == (False, "only an AsyncLLM can be told to drop its KV blocks")

    play(scene)


def test_without_memory_for_two_the_reason_names_both_routes(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path, checkpoint=False)
        await bench.adapter.load(bench.build("a", size_bytes=40 * GIB), 1)
        why = r"not in_place: .*plan; not side_by_side: rank 0: 40.0 GiB in use \+ 40.0 weights \+ 2.0 reserve > 68.0"
        await refused(bench.adapter.update(bench.build("b", size_bytes=40 * GIB), 2), UpdateRefusedError, why)
        assert bench.adapter.generation == 1
        assert len(bench.fake.arguments) == 1

    play(scene)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("rank 1: cannot deserialize the engine"), "rank 1"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (SystemError("boom"), "boom"),
    ],
)
def test_a_failed_load_beside_leaves_the_old_one_serving(bench: Bench, error: Exception, why: str) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        bench.fake.fail[ASYNC_LLM] = [error]
        await refused(bench.adapter.update(bench.build("b"), 2, BESIDE), UpdateFailedError, why)
        assert (await bench.run())[::2] == (bench.expect("a"), {1})
        assert len(bench.fake.live) == 1
        await bench.adapter.update(bench.build("b"), 2, BESIDE)
        assert bench.adapter.generation == 2

    play(scene)


@pytest.mark.parametrize("point", [f"{ASYNC_LLM}.setup_async", f"{ASYNC_LLM}.generate_async"])
def test_an_engine_that_fails_after_loading_is_shut_down_again(bench: Bench, point: str) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        bench.fake.fail[point] = [RuntimeError("no")]
        await refused(bench.adapter.update(bench.build("b"), 2, BESIDE), UpdateFailedError, "generation 1 serves")
        assert len(bench.fake.live) == 1
        assert bench.adapter.generation == 1

    play(scene)


def test_a_slow_request_keeps_the_old_engine_until_it_ends(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream = bench.adapter.generate(request())
        await anext(stream)
        # Not read on: it runs for as long as its client takes.
        report = await bench.adapter.update(bench.build("b"), 2, UpdateOptions(route="side_by_side", drain_s_max=0.01))
        assert not report.drained
        assert len(bench.fake.live) == 2
        await refused(bench.adapter.update(bench.build("c"), 3), UpdateRefusedError, "two are the most")
        assert (await rest(stream))[-1].tokens[-1].finish == "length"
        await until(lambda: len(bench.fake.live) == 1)
        await until(lambda: bench.adapter._other is None)
        assert (await bench.adapter.update(bench.build("c"), 3)).generation == 3

    play(scene)


def test_an_engine_that_is_being_freed_does_not_come_back(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream = bench.adapter.generate(request())
        await anext(stream)
        await bench.adapter.update(bench.build("b"), 2, UpdateOptions(route="side_by_side", drain_s_max=0.01))
        freeing = threading.Event()
        bench.fake.at[f"{ASYNC_LLM}.shutdown"] = lambda: freeing.wait(30)
        other = bench.adapter._other
        assert other is not None
        await rest(stream)
        await until(lambda: other.ending)
        await refused(bench.adapter.exchange(1), UpdateRefusedError, "generation 1 is not resident")
        freeing.set()
        await until(lambda: bench.adapter._other is None)
        assert (await bench.run())[2] == {2}

    play(scene)


def test_the_old_engine_can_be_kept_for_a_rollback(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        keep = UpdateOptions(route="side_by_side", keep_old=True)
        assert (await bench.adapter.update(bench.build("b"), 2, keep)).rollback == "exchange"
        assert (await bench.run())[2] == {2}
        await bench.adapter.exchange(1)
        assert (await bench.run())[::2] == (bench.expect("a"), {1})
        await refused(bench.adapter.release(1), UpdateRefusedError, "generation 1 serves")
        await refused(bench.adapter.release(3), UpdateRefusedError, "generation 3 is not resident")
        await refused(
            bench.adapter.update(bench.build("c"), 3, IN_PLACE), UpdateRefusedError, "generation 2 is still resident"
        )
        await refused(bench.adapter.update(bench.build("c"), 2, BESIDE), UpdateRefusedError, "generation 2 is resident")
        await bench.adapter.release(2)
        await refused(bench.adapter.exchange(2), UpdateRefusedError, "not resident")
        await bench.adapter.exchange(1)
        assert len(bench.fake.live) == 1
        assert (await bench.adapter.stats()).swaps == 2

    play(scene)


def test_keeping_the_old_one_waits_for_nobody(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream = bench.adapter.generate(request())
        await anext(stream)
        keep = UpdateOptions(route="side_by_side", keep_old=True, drain_s_max=1000.0)
        assert not (await bench.adapter.update(bench.build("b"), 2, keep)).drained
        await bench.adapter.exchange(1)
        await stream.aclose()

    play(scene)


def test_releasing_cancels_what_still_runs_there(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream = bench.adapter.generate(request(tokens_max=1000))
        await anext(stream)
        await bench.adapter.update(bench.build("b"), 2, UpdateOptions(route="side_by_side", keep_old=True))
        reading = asyncio.create_task(rest(stream))
        await bench.adapter.release(1)
        assert (await reading)[-1].tokens[-1].finish == "cancelled"
        assert len(bench.fake.live) == 1

    play(scene)


def test_an_engine_that_does_not_shut_down_is_reported(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        bench.fake.fail[f"{ASYNC_LLM}.shutdown"] = [RuntimeError("rank 0 hangs")]
        report = await bench.adapter.update(bench.build("b"), 2, BESIDE)
        assert "generation 1 did not shut down cleanly: RuntimeError: rank 0 hangs" in report.why
        assert (await bench.run())[2] == {2}

    play(scene)
