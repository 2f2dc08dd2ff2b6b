"""Where compiled packages come from: a private store, a compiler or a typed refusal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from engine.errors import CaptureError
from engine.graphs.aoti import STORE_VARIABLE, AotiBackend, PackageStore
from engine.graphs.aoti_compile import to_module
from engine.graphs.aoti_spec import GraphSpec, to_spec
from engine.graphs.errors import BackendUnavailableError
from engine.graphs.record import record
from engine.graphs.testing import capture, eager, make, same, step

CPU = torch.device("cpu")


def test_without_a_compiler_the_refusal_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    weight, static = make(CPU)
    graph = capture(AotiBackend(PackageStore(tmp_path)), weight, static)
    with pytest.raises(BackendUnavailableError, match="no-such-compiler"):
        graph.instantiate(static)
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_a_failed_capture_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, static = make(CPU)

    def unknown(tensors: list[torch.Tensor]) -> None:
        step(weight, tensors)

    backend = AotiBackend(PackageStore(tmp_path))
    graph = backend.capture(unknown, static)  # type: ignore[arg-type]
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(CaptureError, match="does not compile"):
        graph.instantiate(static)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_store_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    store = tmp_path / "store"
    store.mkdir()
    store.chmod(mode)
    weight, static = make(CPU)
    with pytest.raises(BackendUnavailableError, match="others could write"):
        capture(AotiBackend(PackageStore(store)), weight, static).instantiate(static)


def test_a_damaged_package_is_a_failed_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, static = make(CPU)
    monkeypatch.setattr(PackageStore, "get", lambda self, topology: tmp_path / "damaged.pt2")
    (tmp_path / "damaged.pt2").write_bytes(b"not a package")
    with pytest.raises(CaptureError, match="does not load"):
        capture(AotiBackend(PackageStore(tmp_path)), weight, static).instantiate(static)


def test_the_store_is_where_the_operator_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "here"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    weight, static = make(CPU)
    with pytest.raises(BackendUnavailableError, match="here"):
        capture(AotiBackend(), weight, static).instantiate(static)
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700


def test_static_tensors_that_share_memory_are_refused(tmp_path: Path) -> None:
    memory = torch.zeros(2, 4)
    static = [memory[0], memory[1]]
    graph = AotiBackend(PackageStore(tmp_path)).capture(lambda tensors: tensors[0].add_(tensors[1]), static)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="share memory"):
        graph.instantiate(static)


def test_a_graph_crosses_to_the_compiler_as_data_and_means_the_same_there() -> None:
    weight, static = make(CPU)

    def more(tensors: list[torch.Tensor]) -> None:
        step(weight, tensors)
        mask = torch.zeros((3, 8), dtype=torch.float32).masked_fill(tensors[0] > 0.5, float("-inf"))
        (only,) = mask.chunk(1)
        mask = mask + only
        tensors[3].add_(mask.softmax(1, dtype=torch.float32).to(torch.float32, memory_format=torch.contiguous_format))

    recording = record(more, static)  # type: ignore[arg-type]
    spec = msgspec.json.decode(msgspec.json.encode(to_spec(recording.topology)), type=GraphSpec)
    _, found = make(CPU)
    expected = eager(weight, found)
    with torch.no_grad():
        more(expected := [tensor.clone() for tensor in found])
        to_module(spec)(*found, *recording.constants.values())
    assert same(expected, found)


def test_what_cannot_be_written_down_is_refused() -> None:
    weight, static = make(CPU)
    topology = record(partial(step, weight), static).topology
    odd = msgspec.structs  # any object
    call = topology.calls[0]
    broken = type(call)(call.op, call.kind, (*call.args, odd), call.kwargs, call.outputs, call.listed)
    with pytest.raises(TypeError, match="cannot be compiled"):
        to_spec(type(topology)(topology.static, topology.constants, (broken,), topology.values))
