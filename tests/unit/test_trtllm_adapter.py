"""What the TensorRT-LLM adapter does for requests, and with KV memory, on the stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from engine.adapters.errors import (
    BoundaryMissedError,
    EngineFailedError,
    GenerationFailedError,
    OutOfDeviceMemoryError,
    PackageUnusableError,
    RequestRefusedError,
    UpdateRefusedError,
)
from engine.adapters.port import UpdateOptions
from engine.adapters.tensorrt_llm.loading import LoadOptions
from engine.adapters.tensorrt_llm.signatures import ASYNC_LLM, LLM, TRT_LLM, WORKER_EXTENSION
from engine.adapters.tensorrt_llm.testing import FakePackage
from engine.adapters.tensorrt_llm.testing_bench import (
    IN_PLACE,
    Bench,
    late_request,
    play,
    request,
    rest,
    started,
    until,
)
from engine.errors import LoadError
from engine.wire import Sampling, Submit

RESET = f"{WORKER_EXTENSION}.reset_prefix_cache"


async def refused(call: Awaitable[object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        await call


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_first_load_fails_typed(bench: Bench) -> None:
    async def scene() -> None:
        bench.fake.fail[ASYNC_LLM] = [RuntimeError("CUDA out of memory"), RuntimeError("rank 3 died")]
        await refused(bench.adapter.load(bench.build("a"), 1), OutOfDeviceMemoryError, "out of memory")
        await refused(bench.adapter.load(bench.build("a"), 1), LoadError, "rank 3")
        await refused(bench.adapter.update(bench.build("a"), 1), UpdateRefusedError, "nothing is loaded")
        await bench.adapter.load(bench.build("a"), 1)
        await refused(bench.adapter.load(bench.build("b"), 2), UpdateRefusedError, "generation 1 is loaded")

    play(scene)


def test_versions_that_run_no_engine_sets_say_so(tmp_path: Path) -> None:
    async def scene() -> None:
        newest = Bench(tmp_path, FakePackage(without={TRT_LLM}), checkpoint=False)
        await refused(newest.adapter.load(newest.build("a"), 1), PackageUnusableError, "only checkpoints")
        other = Bench(tmp_path, FakePackage(version="1.1.0"), checkpoint=False)
        await refused(
            other.adapter.load(other.build("a"), 1), LoadError, r"built by TensorRT-LLM 1.2.0, installed is 1.1.0"
        )

    play(scene)


def test_a_gate_that_closed_again_lets_nobody_in(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        gate = bench.gate
        gate.close()
        waiting = asyncio.create_task(gate.admit())
        await until(lambda: gate.waiting == 1)
        gate.open()
        gate.close()
        await asyncio.wait([waiting], timeout=0.01)
        assert not waiting.done()
        assert (await bench.adapter.stats()).running == 0
        gate.open()
        (await waiting).leave()

    play(scene)


def test_a_client_who_leaves_ends_the_request(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream = bench.adapter.generate(request(tokens_max=1000))
        await anext(stream)
        assert (await bench.adapter.stats()).running == 1
        await stream.aclose()
        assert "tensorrt_llm.llmapi:RequestOutput.abort" in bench.fake.touched
        assert bench.adapter._active is not None
        assert not bench.adapter._active._results
        assert (await bench.adapter.stats()).running == 0
        assert (await bench.adapter.update(bench.build("b"), 2, IN_PLACE)).drained

    play(scene)


def test_a_client_who_leaves_the_queue_is_forgotten(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream, _ = await started(bench)
        update = asyncio.create_task(bench.adapter.update(bench.build("b"), 2, IN_PLACE))
        late = await late_request(bench)
        late.cancel()
        await until(lambda: bench.gate.waiting == 0)
        bench.fake.proceed()
        await rest(stream)
        await update
        assert (await bench.adapter.stats()).running == 0

    play(scene)


def test_a_failing_request_is_typed_and_leaves_nothing(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        bench.fake.fail[f"{ASYNC_LLM}.generate_async"] = [ValueError("too long")]
        await refused(bench.run(), GenerationFailedError, "ValueError: too long")
        assert (await bench.adapter.stats()).running == 0
        assert (await bench.run())[0] == bench.expect("a")

    play(scene)


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path, checkpoint=False)
        await bench.adapter.load(bench.build("a"), 1)
        await refused(bench.run(tokens_max=510), RequestRefusedError, "3 prompt tokens \\+ 510 new ones > 512")
        await refused(bench.run(prompt=()), RequestRefusedError, "empty")
        asked = Submit(request=1, prompt=(1,), tokens_max=1, sampling=Sampling(logprobs=1))
        await refused(rest(bench.adapter.generate(asked)), RequestRefusedError, "without logprobs")
        assert (await bench.adapter.stats()).running == 0

    play(scene)


def test_statistics_are_worth_no_failure(bench: Bench) -> None:
    async def scene() -> None:
        assert (await bench.adapter.stats()).steps == 0
        await bench.adapter.load(bench.build("a"), 1)
        await bench.run()
        assert (await bench.adapter.stats()).kv_blocks > 0
        bench.fake.fail[f"{ASYNC_LLM}.get_stats_async"] = [RuntimeError("queue closed")]
        assert (await bench.adapter.stats()).kv_blocks == 0

    play(scene)


def test_reclaim_drops_what_is_kept_for_reuse(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        await bench.run()
        assert bench.fake.live[0].reuse
        report = await bench.adapter.reclaim()
        assert (report.done, report.parked) == (True, False)
        assert not bench.fake.live[0].reuse
        assert (await bench.run())[0] == bench.expect("a")

    play(scene)


def test_reclaim_waits_for_quiet(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream, _ = await started(bench)
        await refused(bench.adapter.reclaim(drain_s_max=0.01), BoundaryMissedError, "still run")
        bench.fake.proceed()
        await rest(stream)

    play(scene)


def test_parked_memory_serves_nobody_until_it_is_back(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path, options=LoadOptions(parkable=True))
        await bench.adapter.load(bench.build("a"), 1)
        await bench.run()
        assert "sleep_config" in bench.fake.arguments[0]
        assert (await bench.adapter.reclaim(park=True)).parked
        assert (await bench.adapter.reclaim(park=True)).parked
        late = await late_request(bench)
        await refused(bench.adapter.update(bench.build("b"), 2), UpdateRefusedError, "parked")
        await bench.adapter.resume()
        # The blocks that were released came back without their content.
        assert (await late)[0] == bench.expect("a")
        await bench.adapter.resume()

    play(scene)


@pytest.mark.parametrize("point", [RESET, f"{ASYNC_LLM}.release", f"{ASYNC_LLM}.resume"])
def test_a_reclaim_that_fails_half_way_fails_the_engine(tmp_path: Path, point: str) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path, options=LoadOptions(parkable=True))
        await bench.adapter.load(bench.build("a"), 1)
        bench.fake.fail[point] = [RuntimeError("cuMemUnmap")]

        async def there_and_back() -> None:
            await bench.adapter.reclaim(park=True)
            await bench.adapter.resume()

        await refused(there_and_back(), EngineFailedError, "cuMemUnmap")
        await refused(bench.run(), EngineFailedError, "cuMemUnmap")

    play(scene)


@pytest.mark.parametrize("without", [(), ("salt",)], ids=["salted", "unsalted"])
def test_no_generation_finds_the_kv_blocks_of_another(tmp_path: Path, without: tuple[str, ...]) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path, FakePackage(without=without))
        await bench.adapter.load(bench.build("a"), 1)
        await bench.run()
        if not without:
            # Even when an update should forget to drop the blocks.
            (salts,) = ({salt for salt, _ in engine.reuse} for engine in bench.fake.live)
            assert salts == {"1"}
        await bench.adapter.update(bench.build("b"), 2, IN_PLACE)
        assert (await bench.run())[0] == bench.expect("b")
        assert {salt for salt, _ in bench.fake.live[0].reuse} == ({""} if without else {"2"})

    play(scene)


def test_only_an_engine_loaded_for_it_is_parked(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        report = await bench.adapter.reclaim(park=True)
        assert (report.done, report.why) == (False, "the engine was not loaded to be parked")
        assert (await bench.run())[0] == bench.expect("a")

    play(scene)


def test_reclaim_says_what_the_version_lacks(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path, FakePackage(without={RESET}))
        await bench.adapter.load(bench.build("a"), 1)
        report = await bench.adapter.reclaim()
        assert not report.done
        assert RESET in report.why
        assert (await bench.run())[0] == bench.expect("a")

    play(scene)


def test_without_ray_checkpoints_load_as_plain_llm(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path, options=LoadOptions(asynchronous=False))
        await bench.adapter.load(bench.build("a"), 1)
        assert LLM in bench.fake.touched
        assert (await bench.run())[0] == bench.expect("a")
        await refused(
            bench.adapter.update(bench.build("b"), 2, IN_PLACE), UpdateRefusedError, "not loaded as an AsyncLLM"
        )
        assert (await bench.adapter.update(bench.build("b"), 2)).route == "side_by_side"

    play(scene)


def test_close_cancels_frees_and_refuses(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        await bench.adapter.update(bench.build("b"), 2, UpdateOptions(route="side_by_side", keep_old=True))
        stream = bench.adapter.generate(request(tokens_max=1000))
        await anext(stream)
        reading = asyncio.create_task(rest(stream))
        await bench.adapter.close()
        await bench.adapter.close()
        assert (await reading)[-1].tokens[-1].finish == "cancelled"
        assert not bench.fake.live
        assert bench.adapter.generation is None
        await refused(bench.run(), EngineFailedError, "closed")
        await refused(bench.adapter.load(bench.build("a"), 1), EngineFailedError, "closed")

    play(scene)
