"""The pure parts of the TensorRT-LLM adapter: sampling, stream, statistics, route, memory, weight handles."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.adapters.errors import RequestRefusedError, UpdateRefusedError
from engine.adapters.port import Route
from engine.adapters.tensorrt_llm.artifact import not_interchangeable, read_artifact
from engine.adapters.tensorrt_llm.engine_set import Checkpoint
from engine.adapters.tensorrt_llm.memory import GIB, DeviceMemory, does_not_fit
from engine.adapters.tensorrt_llm.route import choose_route
from engine.adapters.tensorrt_llm.sampling import sampling_arguments
from engine.adapters.tensorrt_llm.signatures import SAMPLING_PARAMS, point
from engine.adapters.tensorrt_llm.stats import load_from
from engine.adapters.tensorrt_llm.stream import TokenStream
from engine.adapters.tensorrt_llm.testing_builds import write_checkpoint, write_engine_set
from engine.adapters.tensorrt_llm.weights import IpcWeights
from engine.build import verify_build
from engine.errors import LoadError
from engine.testing import tiny_build
from engine.wire import Logprobs, Sampling, Submit, Token


def submit(sampling: Sampling | None = None, *, stop: tuple[int, ...] = (), tokens_max: int = 8) -> Submit:
    return Submit(request=7, prompt=(1, 2), tokens_max=tokens_max, sampling=sampling or Sampling(), stop_tokens=stop)


def arguments(sampling: Sampling, **more: Any) -> dict[str, Any]:
    return sampling_arguments(submit(sampling, **more), lambda: 42)


def test_greedy_is_spelled_so_that_every_version_understands_it() -> None:
    assert arguments(Sampling()) == {"end_id": -1, "pad_id": 0, "max_tokens": 8, "detokenize": False, "top_k": 1}


def test_sampling_options_are_all_passed_on() -> None:
    asked = Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=5,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logprobs=3,
    )
    found = arguments(asked, stop=(3, 4))
    assert found == {
        "end_id": 3,
        "pad_id": 3,
        "stop_token_ids": [3, 4],
        "max_tokens": 8,
        "detokenize": False,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 5,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "logprobs": 3,
    }
    assert found.keys() == set(point(SAMPLING_PARAMS).parameters)


def test_without_a_seed_a_random_one_is_drawn() -> None:
    assert arguments(Sampling(temperature=1.0))["seed"] == 42
    assert arguments(Sampling(temperature=1.0, seed=0))["seed"] == 0


def test_refuses_an_option_without_counterpart() -> None:
    with pytest.raises(RequestRefusedError, match="logit_bias"):
        arguments(Sampling(logit_bias=((5, 1.0),)))


def completion(tokens: Sequence[int], finish: str | None = None, logprobs: Any = None) -> Any:
    return SimpleNamespace(token_ids=list(tokens), finish_reason=finish, logprobs=logprobs)


@given(st.lists(st.integers(0, 50), max_size=20), st.lists(st.integers(1, 5), max_size=20))
def test_each_token_once_and_in_order(tokens: list[int], steps: list[int]) -> None:
    stream = TokenStream(submit(stop=(99,)))
    got: list[Token] = []
    at = 0
    for step in [*steps, len(tokens)]:
        at = min(at + step, len(tokens))
        got += stream.advance(completion(tokens[:at]), ended=False)
    got += stream.advance(completion(tokens, "length"), ended=True)
    assert [token.token for token in got[:-1]] == tokens
    assert (got[-1].token, got[-1].finish, {token.request for token in got}) == (-1, "length", {7})
    assert stream.finished


@pytest.mark.parametrize("included", [True, False])
def test_the_stop_token_is_never_emitted(included: bool) -> None:
    stream = TokenStream(submit(stop=(99,)))
    got = stream.advance(completion([5, 99] if included else [5], "stop"), ended=True)
    assert [(token.token, token.finish) for token in got] == [(5, None), (-1, "stop")]


def test_nothing_follows_a_stop_token() -> None:
    got = TokenStream(submit(stop=(99,))).advance(completion([5, 99, 6]), ended=False)
    assert [(token.token, token.finish) for token in got] == [(5, None), (-1, "stop")]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("stop", "stop"), ("length", "length"), ("cancelled", "cancelled"), ("timeout", "error"), ("new", "error")],
)
def test_finish_reasons(theirs: str, ours: str) -> None:
    assert TokenStream(submit()).advance(completion([], theirs), ended=True)[-1].finish == ours


def test_an_end_without_reason_is_a_cancellation() -> None:
    assert TokenStream(submit()).advance(completion([]), ended=True)[-1].finish == "cancelled"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, None),
        (0, Logprobs(-2.0, ())),
        (1, Logprobs(-2.0, ((6, -0.5),))),
        (2, Logprobs(-2.0, ((6, -0.5), (5, -2.0)))),
    ],
)
def test_logprobs(wanted: int | None, expected: Logprobs | None) -> None:
    values = [{5: SimpleNamespace(logprob=-2.0), 6: SimpleNamespace(logprob=-0.5)}]
    stream = TokenStream(submit(Sampling(logprobs=wanted)))
    assert stream.advance(completion([5], None, values), ended=False)[0].logprobs == expected


def test_logprobs_as_bare_numbers_and_late_ones() -> None:
    stream = TokenStream(submit(Sampling(logprobs=0)))
    first, second = stream.advance(completion([5, 6], None, [-0.25]), ended=False)
    assert first.logprobs == Logprobs(-0.25)
    assert second.logprobs is None


def test_statistics_in_the_words_of_the_wire() -> None:
    kv = {"maxNumBlocks": 100, "usedNumBlocks": 9, "tokensPerBlock": 32, "reusedBlocks": 3, "missedBlocks": 1}
    load = load_from({"iter": 5, "numQueuedRequests": 2, "kvCacheStats": kv}, running=6, waiting=1, swaps=4)
    assert (load.running, load.waiting, load.steps, load.swaps) == (4, 3, 5, 4)
    assert (load.kv_blocks, load.kv_blocks_used, load.prefix_query_tokens, load.prefix_hit_tokens) == (100, 9, 128, 96)


@pytest.mark.parametrize(
    "iteration", [None, {}, {"kvCacheStats": None}, {"iter": "x", "kvCacheStats": {"maxNumBlocks": -1}}]
)
def test_missing_statistics_are_zero(iteration: Any) -> None:
    load = load_from(iteration, running=2, waiting=0, swaps=0)
    assert sum(msgspec.structs.astuple(load)) == 2


@pytest.mark.parametrize(
    ("wanted", "not_in_place", "not_beside", "route", "why"),
    [
        ("auto", "", "", "in_place", ""),
        ("auto", "", "small", "in_place", "not side_by_side: small"),
        ("auto", "old", "", "side_by_side", "not in_place: old"),
        ("side_by_side", "", "", "side_by_side", ""),
        ("in_place", "", "", "in_place", ""),
    ],
)
def test_the_route(wanted: Any, not_in_place: str, not_beside: str, route: Route, why: str) -> None:
    assert choose_route(wanted, not_in_place=not_in_place, not_beside=not_beside) == (route, why)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [("auto", "not in_place: old; not side_by_side: small"), ("in_place", "not in_place: old")],
)
def test_a_refusal_names_every_closed_route(wanted: Any, why: str) -> None:
    with pytest.raises(UpdateRefusedError, match=why):
        choose_route(wanted, not_in_place="old", not_beside="small")


def fit(used: int, size: int, total: int = 80) -> str:
    return does_not_fit([DeviceMemory(used * GIB, total * GIB)], [size * GIB], reserve_bytes=2 * GIB, ceiling=0.85)


def test_the_memory_rule_and_its_arithmetic() -> None:
    assert fit(50, 16) == ""
    assert fit(51, 16) == "rank 0: 51.0 GiB in use + 16.0 weights + 2.0 reserve > 68.0 (85% of 80.0)"
    assert does_not_fit([], [1], reserve_bytes=0, ceiling=1.0) == "1 ranks, but 0 devices"


def test_every_rank_must_fit() -> None:
    devices = [DeviceMemory(0, 80 * GIB), DeviceMemory(70 * GIB, 80 * GIB)]
    assert does_not_fit(devices, [GIB, GIB], reserve_bytes=0, ceiling=0.85).startswith("rank 1:")


def test_bytes_by_rank(tmp_path: Path) -> None:
    write_engine_set(tmp_path / "set", world_size=2)
    write_checkpoint(tmp_path / "checkpoint")
    assert read_artifact(tmp_path / "set").rank_bytes(1) == (11, 11)
    checkpoint = read_artifact(tmp_path / "checkpoint")
    assert isinstance(checkpoint.files, Checkpoint)
    total = sum((tmp_path / "checkpoint" / name).stat().st_size for name in checkpoint.files.weights)
    assert checkpoint.rank_bytes(3) == (-(-total // 3),) * 3


def test_weights_can_only_replace_weights_of_the_same_shape(tmp_path: Path) -> None:
    def artifact(name: str, **how: Any) -> Any:
        write_checkpoint(tmp_path / name, **how)
        return read_artifact(tmp_path / name)

    base = artifact("a")
    assert not_interchangeable(base, artifact("b", weights="b")) == ""
    assert not_interchangeable(base, artifact("c", hidden=8)) == "config.json differs"
    assert not_interchangeable(base, artifact("d", shapes={"embed": [4, 2]})) == "tensor head is only in the old build"
    wider = {"embed": [4, 2], "head": [3]}
    assert not_interchangeable(base, artifact("e", shapes=wider)) == "tensor head is F32 [3], was F32 [2]"
    write_engine_set(tmp_path / "f")
    assert "part of its plan" in not_interchangeable(base, read_artifact(tmp_path / "f"))


@pytest.mark.parametrize("header", [b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\x08\0\0\0\0\0\0\0" + b'{"a": 1}'])
def test_a_damaged_weight_file_is_a_load_error(tmp_path: Path, header: bytes) -> None:
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name)
    (tmp_path / "b" / "model-0.safetensors").write_bytes(header)
    with pytest.raises(LoadError, match=r"model-0\.safetensors"):
        not_interchangeable(read_artifact(tmp_path / "a"), read_artifact(tmp_path / "b"))


def test_other_builds_are_not_ours(tmp_path: Path) -> None:
    tiny_build(tmp_path / "a", seed=0, version="1")
    with pytest.raises(LoadError, match="for engine patchctl-torch"):
        read_artifact(tmp_path / "a")
    write_engine_set(tmp_path / "b")
    (tmp_path / "b" / "config.json").unlink()
    with pytest.raises(LoadError, match=r"config\.json"):
        read_artifact(tmp_path / "b")


def test_weight_handles_carry_every_tensor_in_bounded_buckets(tmp_path: Path) -> None:
    tensors = {name: torch.full((size,), float(size)) for name, size in (("a", 3), ("b", 2), ("c", 100), ("d", 1))}
    save_file({name: tensors[name] for name in "ab"}, tmp_path / "1.safetensors")
    save_file({name: tensors[name] for name in "cd"}, tmp_path / "2.safetensors")
    source = IpcWeights((0, 1), uuid_of=lambda device: f"GPU-{device}", bucket_bytes=24, kind="cpu")
    got: list[list[str]] = []
    buckets = source.buckets(tmp_path, ("1.safetensors", "2.safetensors"))
    for handles in buckets:
        assert handles.keys() == {"GPU-0", "GPU-1"}
        entries = pickle.loads(base64.b64decode(handles["GPU-1"]))  # noqa: S301 - made two lines above
        got.append([name for name, _ in entries])
        for name, (rebuild, rebuild_arguments) in entries:
            assert torch.equal(rebuild(*rebuild_arguments), tensors[name])
    # 12 + 8 bytes share a bucket, 400 bytes are one of their own.
    assert got == [["a", "b"], ["c"], ["d"]]


def test_the_writers_of_test_builds_write_builds(tmp_path: Path) -> None:
    assert verify_build(tmp_path / "a", write_checkpoint(tmp_path / "a").digest).engine_kind == "tensorrt_llm"
    assert json.loads((tmp_path / "a" / "config.json").read_bytes())["architectures"] == ["LlamaForCausalLM"]
