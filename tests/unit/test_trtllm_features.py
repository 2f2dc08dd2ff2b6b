"""Which features an installed TensorRT-LLM has, and what its absence looks like."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from engine.adapters.errors import DeviceMissingError, PackageMissingError, PackageUnusableError
from engine.adapters.tensorrt_llm.features import detect, mismatch
from engine.adapters.tensorrt_llm.package import open_package
from engine.adapters.tensorrt_llm.signatures import (
    ASYNC_LLM,
    KV_CACHE_CONFIG,
    LLM,
    POINTS,
    TRT_LLM,
    WORKER_EXTENSION,
    Feature,
    point,
)
from engine.adapters.tensorrt_llm.testing import FakePackage

NEVER_IMPORTED = """
import sys
import engine, engine.build, engine.adapters.port, engine.adapters.tensorrt_llm.adapter
bad = sorted(name for name in ("tensorrt_llm", "torch", "ray") if name in sys.modules)
assert not bad, bad
"""


def test_importing_the_adapter_imports_neither_the_package_nor_torch() -> None:
    subprocess.run([sys.executable, "-P", "-c", NEVER_IMPORTED], check=True, timeout=60)


@pytest.mark.parametrize(
    ("without", "lost"),
    [
        (set(), set()),
        ({TRT_LLM}, {"engine_set"}),
        ({"salt"}, {"salt"}),
        ({f"{ASYNC_LLM}.update_weights"}, {"in_place"}),
        ({f"{WORKER_EXTENSION}.update_weights"}, {"in_place"}),
        ({f"{ASYNC_LLM}.pause_generation"}, {"pause"}),
        ({f"{WORKER_EXTENSION}.reset_prefix_cache"}, {"reuse_reset", "park", "sleep_config"}),
        ({f"{ASYNC_LLM}.setup_async"}, {"async", "in_place", "pause", "reuse_reset", "park", "sleep_config"}),
    ],
)
def test_a_feature_is_there_when_all_its_points_are(without: set[str], lost: set[Feature]) -> None:
    features = detect(FakePackage(without=without).importer)
    assert set(features.lacking) == lost
    for feature in lost:
        assert next(iter(without)) in features.why_not(feature)


def test_every_point_of_the_table_matters() -> None:
    for entry in POINTS:
        assert entry.feature not in detect(FakePackage(without={entry.name}).importer), entry.name


def module(**members: Any) -> ModuleType:
    made = ModuleType("made")
    vars(made).update(members)
    return made


class Base:
    def __init__(self, model: str, skip_tokenizer_init: bool = False, **kwargs: Any) -> None: ...

    def generate_async(self, inputs: object, sampling_params: object = None, streaming: bool = False) -> None: ...


class Forwarding(Base):
    """As AsyncLLM does since it can pause: everything is passed on."""

    def generate_async(self, *args: Any, **kwargs: Any) -> None: ...


class Renamed(Base):
    def generate_async(self, prompts: object, sampling_params: object = None, streaming: bool = False) -> None: ...


class Eager:
    async def setup_async(self) -> None: ...

    def update_weights(self, ipc_handles: object) -> None: ...


class Args:
    model_fields = dict.fromkeys(("kv_cache_config", "gather_generation_logits"))


def differs(name: str, **members: Any) -> str:
    return mismatch(point(name), lambda _name: module(**members))


def test_signatures_are_compared_by_name() -> None:
    generate = f"{LLM}.generate_async"
    assert differs(generate, LLM=Base) == ""
    assert differs(generate, LLM=Forwarding) == ""
    assert differs(generate, LLM=Renamed) == f"{generate} has no parameter inputs"
    assert differs(f"{LLM}.shutdown", LLM=Base).startswith(f"{LLM}.shutdown is not there (AttributeError")
    assert differs(f"{LLM}.shutdown", LLM=type("X", (), {"shutdown": 3})) == f"{LLM}.shutdown is not callable"


def test_what_must_be_a_coroutine_is_one() -> None:
    assert differs(f"{ASYNC_LLM}.setup_async", AsyncLLM=Eager) == ""
    plain = type("X", (), {"setup_async": lambda self: None})
    assert differs(f"{ASYNC_LLM}.setup_async", AsyncLLM=plain) == f"{ASYNC_LLM}.setup_async is not a coroutine function"


def test_what_is_left_out_must_have_a_default() -> None:
    name = f"{WORKER_EXTENSION}.update_weights"
    assert differs(name, WorkerExtension=Eager) == f"{name} needs ipc_handles"


def test_forwarded_keywords_are_looked_up_in_the_model_that_checks_them() -> None:
    assert differs(TRT_LLM, LLM=Base, TrtLlmArgs=Args) == ""
    older = type("X", (), {"model_fields": {"kv_cache_config": None}})
    assert differs(TRT_LLM, LLM=Base, TrtLlmArgs=older).endswith("has no field gather_generation_logits")
    assert "TrtLlmArgs is not there" in differs(TRT_LLM, LLM=Base)
    assert differs(TRT_LLM, LLM=type("X", (), {}), TrtLlmArgs=Args) == f"{TRT_LLM} has no parameter model"


def test_a_version_is_never_compared_to_decide_what_is_possible() -> None:
    assert not detect(FakePackage(version="0.0.1").importer).lacking


def test_not_installed() -> None:
    with pytest.raises(PackageMissingError, match=r"install patchctl\[tensorrt\]") as caught:
        open_package(FakePackage(missing=True).importer)
    assert caught.value.code == "engine_missing"


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is not None, reason="tensorrt_llm is installed here")
def test_not_installed_here() -> None:
    with pytest.raises(PackageMissingError):
        open_package()


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcuda.so.1: cannot open shared object file: No such file or directory"),
        RuntimeError("Found no NVIDIA driver on your system"),
        OSError("libnvidia-ml.so.1: cannot open shared object file"),
    ],
)
def test_no_driver(error: Exception) -> None:
    with pytest.raises(DeviceMissingError, match="no GPU driver"):
        open_package(FakePackage(import_error=error).importer)


def test_no_gpu() -> None:
    with pytest.raises(DeviceMissingError, match="no GPU"):
        open_package(FakePackage(devices=0).importer)


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'ray'", name="ray"), SyntaxError("x"), ImportError("y")]
)
def test_installed_but_broken(error: Exception) -> None:
    with pytest.raises(PackageUnusableError, match="does not import"):
        open_package(FakePackage(import_error=error).importer)


def test_a_stub_or_an_unknown_version() -> None:
    with pytest.raises(PackageUnusableError, match="KvCacheConfig"):
        open_package(FakePackage(without={KV_CACHE_CONFIG}).importer)


def test_only_what_is_in_the_table_can_be_had() -> None:
    package = open_package(FakePackage().importer)
    assert package[LLM].__name__ == "LLM"
    with pytest.raises(KeyError):
        package["tensorrt_llm:BuildConfig"]
