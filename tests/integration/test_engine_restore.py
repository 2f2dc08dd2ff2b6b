"""Stored bytes put back into live tensors: bit-exact, at a step boundary, or not at all."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine import restoring
from engine.build import BuildManifest
from engine.inspection import DigestTensors
from engine.loop import ServeLoop
from engine.process_testing import EngineProcess, prompt
from engine.testing import tiny_build
from engine.wire import Inspect, Release, Reply, Restore, RestoreTensor, Swap

_TENSOR = "model.layers.0.self_attn.q_proj.weight"
_EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("builds")
    tiny_build(root / "a", seed=1, version="1.0.0")
    tiny_build(root / "same-weights", seed=1, version="1.0.1")
    tiny_build(root / "b", seed=2, version="2.0.0")
    return root


@pytest.fixture(scope="module")
def engine(builds: Path) -> Iterator[EngineProcess]:
    with EngineProcess() as process:
        yield process


@pytest.fixture
def generation(engine: EngineProcess, builds: Path) -> int:
    return engine.serve(builds / "a")


def tensors_of(engine: EngineProcess, generation: int) -> dict[str, Any]:
    return engine.ok(Inspect(generation))["tensors"]  # type: ignore[no-any-return]


def remote(engine: EngineProcess, call: str, address: int, data: bytearray) -> None:
    """``process_vm_readv`` or ``process_vm_writev`` on the engine: its parent may."""
    buffer = (ctypes.c_char * len(data)).from_buffer(data)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), len(data))
    there = (ctypes.c_uint64 * 2)(address, len(data))
    done = getattr(ctypes.CDLL(None, use_errno=True), call)(engine.process.pid, local, 1, there, 1, 0)
    assert done == len(data), ctypes.get_errno()


def read(engine: EngineProcess, entry: dict[str, Any]) -> bytes:
    data = bytearray(entry["nbytes"])
    remote(engine, "process_vm_readv", entry["address"], data)
    return bytes(data)


def corrupt(engine: EngineProcess, entry: dict[str, Any]) -> None:
    remote(engine, "process_vm_writev", entry["address"], bytearray(b"\x3f" * (entry["nbytes"] // 2)))


def restore(
    engine: EngineProcess, generation: int, folder: Path, content: Path, names: tuple[str, ...], **change: Any
) -> Reply:
    """Restore ``names`` from a file of their bytes, made by :func:`store`."""
    stored = msgspec.json.decode(content.with_suffix(".json").read_bytes())
    tensors = tuple(
        RestoreTensor(**{**{key: stored[name][key] for key in RestoreTensor.__struct_fields__}, **change})
        for name in names
    )
    digest = msgspec.json.decode((folder / "build.json").read_bytes(), type=BuildManifest).digest
    return engine.call(Restore(generation, digest, str(content), tensors))


def store(engine: EngineProcess, generation: int, path: Path) -> dict[str, Any]:
    """Write the bytes of every tensor into one file; what they were beside it."""
    found, offset = {}, 0
    with path.open("wb") as file:
        for name, entry in tensors_of(engine, generation).items():
            if "alias_of" in entry:
                continue
            data = read(engine, entry)
            assert hashlib.sha256(data).hexdigest() == entry["digest"]
            found[name] = {**entry, "name": name, "offset": offset}
            offset += file.write(data)
    path.with_suffix(".json").write_bytes(msgspec.json.encode(found))
    return found


def test_inspect_lists_weights_buffers_and_aliases_with_their_addresses(
    engine: EngineProcess, generation: int, tmp_path: Path
) -> None:
    found = store(engine, generation, tmp_path / "content")
    derived = {name for name, entry in found.items() if entry["derived"]}
    assert derived == {"buffers.positions", "buffers.rope_cos", "buffers.rope_sin"}
    assert found[_TENSOR]["nbytes"] == np.prod(found[_TENSOR]["shape"]) * 4


@pytest.mark.parametrize("names", [(_TENSOR,), (_TENSOR, _EMBEDDING, "buffers.rope_cos", "model.norm.weight")])
def test_restore_is_bit_exact_while_requests_run(
    engine: EngineProcess, generation: int, builds: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    expected = engine.run(prompt(0))
    entries = store(engine, generation, tmp_path / "content")
    for name in names:
        corrupt(engine, entries[name])
    spoiled = tensors_of(engine, generation)
    assert {name for name, entry in entries.items() if spoiled[name]["digest"] != entry["digest"]} == set(names)
    running = engine.start(2)

    reply = restore(
        engine, generation, builds / "a", tmp_path / "content", (*names, "model.layers.1.mlp.up_proj.weight")
    )

    assert reply.data == {"restored": list(names), "unchanged": 1, "kv_dropped": [generation]}
    assert [engine.finish(request) for request in running] == ["length", "length"]
    now = tensors_of(engine, generation)
    assert {name: now[name]["digest"] for name in entries} == {name: e["digest"] for name, e in entries.items()}
    assert all(
        read(engine, now[name]) == (tmp_path / "content").read_bytes()[e["offset"] :][: e["nbytes"]]
        for name, e in entries.items()
    )
    assert engine.run(prompt(0)) == expected, "KV of the spoiled weights was used again"


def test_running_sequences_go_on_with_kv_of_the_restored_weights(
    engine: EngineProcess, generation: int, builds: Path, tmp_path: Path
) -> None:
    """From the restore on, every token is what the right weights give for the tokens before it."""
    entries = store(engine, generation, tmp_path / "content")
    corrupt(engine, entries[_TENSOR])
    request = engine.start(1)[0]
    assert restore(engine, generation, builds / "a", tmp_path / "content", (_TENSOR,)).ok
    at_reply = len(engine.answer(request))
    assert engine.finish(request) == "length"
    answer = engine.answer(request)
    assert at_reply < len(answer) - 8, "the request was over before the restore"
    # Tokens of one more step may have been under way when the reply came.
    known = [*prompt(0), *answer[: at_reply + 2]]
    assert engine.run(known, len(answer) - at_reply - 2) == answer[at_reply + 2 :]


def test_prefixes_that_the_spoiled_weights_made_are_forgotten(
    engine: EngineProcess, generation: int, builds: Path, tmp_path: Path
) -> None:
    long = [*prompt(3), *prompt(4), *prompt(5)]
    entries = store(engine, generation, tmp_path / "content")
    corrupt(engine, entries[_TENSOR])
    spoiled = engine.run(long, 8)
    assert restore(engine, generation, builds / "a", tmp_path / "content", (_TENSOR,)).ok
    answer = engine.run(long, 8)
    engine.serve(builds / "a")
    assert answer == engine.run(long, 8) != spoiled


def test_shared_weights_are_restored_for_both_generations(
    engine: EngineProcess, generation: int, builds: Path, tmp_path: Path
) -> None:
    expected = engine.run(prompt(1))
    entries = store(engine, generation, tmp_path / "content")
    second, reply = engine.stage(builds / "same-weights")
    assert reply.ok
    corrupt(engine, entries[_TENSOR])
    running = engine.start(1)
    engine.ok(Swap(second, "carry"))
    reply = restore(engine, generation, builds / "a", tmp_path / "content", (_TENSOR,))
    assert reply.data["kv_dropped"] == [generation, second]
    assert engine.finish(running[0]) == "length"
    assert engine.run(prompt(1)) == expected
    engine.ok(Swap(generation, "carry"))
    assert engine.run(prompt(1)) == expected
    engine.ok(Release(second))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": "model.nothing"}, "has no tensor model.nothing"),
        ({"name": "lm_head.weight"}, "no tensor lm_head.weight of its own"),
        ({"dtype": "bfloat16"}, "not bfloat16"),
        ({"shape": (1, 2)}, "not float32[1, 2]"),
        ({"address": 4096}, "has moved in memory"),
        ({"digest": "0" * 64}, "not those that were asked for"),
        ({"offset": 8}, "not those that were asked for"),
        ({"offset": 1 << 40}, "not those that were asked for"),
    ],
)
def test_a_refused_restore_changes_nothing(
    engine: EngineProcess, generation: int, builds: Path, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    entries = store(engine, generation, tmp_path / "content")
    corrupt(engine, entries[_TENSOR])
    corrupt(engine, entries[_EMBEDDING])
    before = tensors_of(engine, generation)
    stored = msgspec.json.decode((tmp_path / "content.json").read_bytes())
    # The first tensor alone could be restored: the second one's refusal must keep it from that.
    tensors = [
        RestoreTensor(**{key: stored[name][key] for key in RestoreTensor.__struct_fields__})
        for name in (_EMBEDDING, _TENSOR)
    ]
    tensors[1] = msgspec.structs.replace(tensors[1], **change)
    digest = msgspec.json.decode((builds / "a" / "build.json").read_bytes(), type=BuildManifest).digest
    reply = engine.call(Restore(generation, digest, str(tmp_path / "content"), tuple(tensors)))
    assert reply.code == "restore_refused"
    assert why in reply.what
    assert tensors_of(engine, generation) == before
    assert restore(engine, generation, builds / "a", tmp_path / "content", (_EMBEDDING, _TENSOR)).ok


def test_another_build_another_generation_and_a_lost_file_are_refused(
    engine: EngineProcess, generation: int, builds: Path, tmp_path: Path
) -> None:
    entries = store(engine, generation, tmp_path / "content")
    reply = restore(engine, generation, builds / "b", tmp_path / "content", (_TENSOR,))
    assert (reply.code, "is build" in reply.what) == ("restore_refused", True)
    assert restore(engine, 999, builds / "a", tmp_path / "content", (_TENSOR,)).code == "not_ready"
    corrupt(engine, entries[_TENSOR])
    (tmp_path / "content").rename(tmp_path / "elsewhere")
    before = tensors_of(engine, generation)
    assert restore(engine, generation, builds / "a", tmp_path / "content", (_TENSOR,)).code == "restore_refused"
    assert tensors_of(engine, generation) == before
    (tmp_path / "elsewhere").rename(tmp_path / "content")
    assert restore(engine, generation, builds / "a", tmp_path / "content", (_TENSOR,)).ok


# What goes wrong in the middle of writing: no process, the tensors alone.


def _sha(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(array).hexdigest() for name, array in arrays.items()}


def _writes(count: int) -> list[restoring._Write]:
    writes = []
    for i in range(count):
        target, source = torch.full((64,), i, dtype=torch.uint8), torch.full((64,), 100 + i, dtype=torch.uint8)
        digest = hashlib.sha256(source.numpy().tobytes()).hexdigest()
        writes.append(restoring._Write(f"t{i}", target, source, target.clone(), digest))
    return writes


def _restorer(digest: DigestTensors) -> restoring.Restorer:
    return restoring.Restorer(ServeLoop(), digest)


def test_a_write_that_fails_half_way_is_undone() -> None:
    writes = _writes(3)
    broken = restoring._Write("t1", writes[1].target, torch.zeros(3, dtype=torch.uint8), writes[1].kept, "")
    with pytest.raises(restoring.RestoreRefusedError, match="was undone") as caught:
        _restorer(_sha)._write_checked([writes[0], broken, writes[2]])
    assert caught.value.code == "restore_undone"
    assert all(torch.equal(one.target, one.kept) for one in writes)


def test_bytes_that_do_not_hash_right_after_writing_are_undone() -> None:
    writes = _writes(2)
    with pytest.raises(restoring.RestoreRefusedError, match="t1 did not hold what was written"):
        _restorer(lambda arrays: {**_sha(arrays), "t1": "wrong"})._write_checked(writes)
    assert all(torch.equal(one.target, one.kept) for one in writes)


def test_an_undo_that_fails_says_so_and_still_gives_the_others_back() -> None:
    writes = _writes(3)
    broken = restoring._Write("t1", writes[1].target, torch.zeros(3, dtype=torch.uint8), torch.zeros(3), "")
    with pytest.raises(restoring.RestoreIncompleteError, match="t1 could not be given its bytes back"):
        _restorer(_sha)._write_checked([writes[0], broken, writes[2]])
    assert torch.equal(writes[0].target, writes[0].kept)
    assert torch.equal(writes[2].target, writes[2].kept)
