"""What the adapter uses of TensorRT-LLM against the signature table, and the table against the real package."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.adapters.port import UpdateOptions
from engine.adapters.tensorrt_llm.adapter import TensorRtLlm
from engine.adapters.tensorrt_llm.features import detect, mismatch
from engine.adapters.tensorrt_llm.loading import LoadOptions
from engine.adapters.tensorrt_llm.package import open_package
from engine.adapters.tensorrt_llm.signatures import LLM, POINTS, Point, point
from engine.adapters.tensorrt_llm.testing import FakePackage, FakeWeights
from engine.adapters.tensorrt_llm.testing_builds import write_checkpoint, write_engine_set
from engine.errors import LoadError
from engine.wire import Sampling, Submit

ASKED = Sampling(
    temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=1, presence_penalty=0.1, frequency_penalty=0.1, logprobs=2
)


async def everything(root: Path, fake: FakePackage) -> None:
    """Everything the adapter can do, on every kind of engine."""
    write_engine_set(root / "set")
    for weights in "ab":
        write_checkpoint(root / weights, weights=weights)
    for folder, options in (
        ("set", LoadOptions(logprobs=True)),
        ("a", LoadOptions(asynchronous=False)),
        ("a", LoadOptions(parkable=True)),
    ):
        adapter = TensorRtLlm(options, importer=fake.importer, weights=FakeWeights())
        await adapter.load(root / folder, 1)
        request = Submit(request=1, prompt=(1, 2), tokens_max=3, sampling=ASKED, stop_tokens=(0,))
        async for _ in adapter.generate(request):
            pass
        leaving = adapter.generate(request)
        await anext(leaving)
        await leaving.aclose()
        await adapter.stats()
        if options.parkable:
            await adapter.update(root / "b", 2, UpdateOptions(route="in_place"))
            await adapter.reclaim(park=True)
            await adapter.resume()
            assert adapter._package is not None
            adapter._ipc_weights(adapter._package)._uuid_of(0)
        await adapter.close()


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> FakePackage:
    fake = FakePackage()
    asyncio.run(everything(tmp_path_factory.mktemp("builds"), fake))
    return fake


def test_the_adapter_uses_the_whole_table_and_nothing_else(used: FakePackage) -> None:
    # The stand-in has nothing that is not in the table; what the table has in vain would be guarded in vain.
    unused = {entry.name for entry in POINTS} - used.touched - {"tensorrt_llm:__version__"}
    assert not unused


def test_the_stand_in_refuses_what_the_table_does_not_list() -> None:
    llm = FakePackage().importer("tensorrt_llm").LLM
    with pytest.raises(TypeError, match="unexpected argument 'quantization'"):
        llm(model="x", quantization="fp8")
    with pytest.raises(TypeError, match="keyword"):
        llm("x")
    with pytest.raises(AttributeError):
        _ = llm.generate
    with pytest.raises(ModuleNotFoundError):
        FakePackage().importer("tensorrt_llm.runtime")


def test_every_fact_says_where_it_was_read() -> None:
    for entry in POINTS:
        assert entry.source.path, entry.name
        assert len(entry.source.commit) == 40 or entry.source.version, entry.name
    assert len({entry.name for entry in POINTS}) == len(POINTS)
    assert point(LLM).source.path == "tensorrt_llm/llmapi/llm.py"


def test_the_stand_in_has_the_signatures_of_the_table() -> None:
    fake = FakePackage()
    assert [mismatch(entry, fake.importer) for entry in POINTS] == [""] * len(POINTS)


@pytest.fixture(scope="module")
def real() -> str:
    try:
        return open_package().version
    except LoadError as error:
        pytest.skip(f"the signatures of tensorrt_llm were not compared with the table: {error}")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "entry", [entry for entry in POINTS if entry.feature in {"core", "checkpoint"}], ids=lambda p: p.name
)
def test_the_real_package_has_what_is_always_needed(real: str, entry: Point) -> None:
    assert mismatch(entry, importlib.import_module) == "", f"in tensorrt_llm {real}"


@pytest.mark.gpu
def test_the_real_package_runs_a_layout(real: str, record_property: Callable[[str, object], None]) -> None:
    features = detect()
    record_property("tensorrt_llm", f"{real}: lacking {features.lacking}")
    assert "checkpoint" in features or "engine_set" in features
