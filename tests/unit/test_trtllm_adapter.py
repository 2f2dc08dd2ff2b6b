"""The TensorRT-LLM adapter against the stand-in: updates, failures, memory, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.adapters.errors import (
    BoundaryMissedError,
    EngineFailedError,
    GenerationFailedError,
    OutOfDeviceMemoryError,
    PackageUnusableError,
    RequestRefusedError,
    UpdateFailedError,
    UpdateRefusedError,
)
from engine.adapters.port import UpdateOptions
from engine.adapters.tensorrt_llm.adapter import TensorRtLlm
from engine.adapters.tensorrt_llm.loading import LoadOptions
from engine.adapters.tensorrt_llm.memory import GIB
from engine.adapters.tensorrt_llm.signatures import ASYNC_LLM, LLM, TRT_LLM, WORKER_EXTENSION
from engine.adapters.tensorrt_llm.testing import FakePackage, FakeWeights, fake_token
from engine.adapters.tensorrt_llm.testing_builds import write_checkpoint, write_engine_set
from engine.errors import LoadError
from engine.wire import Sampling, Submit, Tokens

PROMPT = (3, 1, 4)
TRT_NAME = TRT_LLM
BESIDE = UpdateOptions(route="side_by_side")
IN_PLACE = UpdateOptions(route="in_place")
RESET = f"{WORKER_EXTENSION}.reset_prefix_cache"


def request(number: int = 1, tokens_max: int = 4, prompt: tuple[int, ...] = PROMPT) -> Submit:
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

    def build(self, weights: str, **how: Any) -> Path:
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
        return [engine.digest for engine in self.fake.live]


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
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
    await until(lambda: not bench.adapter._gate._open.is_set())
    late = asyncio.create_task(bench.run(number=2))
    await until(lambda: bench.adapter._gate.waiting == 1)
    return late


async def rest(stream: AsyncIterator[Tokens]) -> list[Tokens]:
    return [message async for message in stream]


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
        newest = Bench(tmp_path, FakePackage(without={TRT_NAME}), checkpoint=False)
        await refused(newest.adapter.load(newest.build("a"), 1), PackageUnusableError, "only checkpoints")
        other = Bench(tmp_path, FakePackage(version="1.1.0"), checkpoint=False)
        await refused(
            other.adapter.load(other.build("a"), 1), LoadError, r"built by TensorRT-LLM 1.2.0, installed is 1.1.0"
        )

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


@pytest.mark.parametrize("options", [IN_PLACE, BESIDE], ids=["in_place", "side_by_side"])
def test_a_hard_stop_ends_them(bench: Bench, options: UpdateOptions) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream, _ = await started(bench)
        reading = asyncio.create_task(rest(stream))
        hard = UpdateOptions(route=options.route, drain_s_max=0.01, hard_stop=True)
        # The new engine's probe must pass while the old one's request stands still.
        updating = asyncio.create_task(bench.adapter.update(bench.build("b"), 2, hard))
        if options is BESIDE:
            await until(lambda: len(bench.fake.live) == 2)
            bench.fake.proceed()
        else:
            await until(reading.done)
            bench.fake.proceed()
        finish = (await reading)[-1].tokens[-1].finish
        assert finish == ("cancelled" if options is IN_PLACE else "length")
        assert (await updating).drained
        assert len(bench.fake.live) == 1

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


def test_a_client_who_leaves_ends_the_request(bench: Bench) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        stream = bench.adapter.generate(request(tokens_max=1000))
        await anext(stream)
        assert (await bench.adapter.stats()).running == 1
        await stream.aclose()
        assert "tensorrt_llm.llmapi:RequestOutput.abort" in bench.fake.touched
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
        await until(lambda: bench.adapter._gate.waiting == 0)
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
def test_a_reclaim_that_fails_half_way_fails_the_engine(bench: Bench, point: str) -> None:
    async def scene() -> None:
        await bench.adapter.load(bench.build("a"), 1)
        bench.fake.fail[point] = [RuntimeError("cuMemUnmap")]

        async def there_and_back() -> None:
            await bench.adapter.reclaim(park=True)
            await bench.adapter.resume()

        await refused(there_and_back(), EngineFailedError, "cuMemUnmap")
        await refused(bench.run(), EngineFailedError, "cuMemUnmap")

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
