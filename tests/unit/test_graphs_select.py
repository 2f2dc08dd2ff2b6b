from __future__ import annotations

import pytest
import torch

from engine.graphs.errors import BackendUnavailableError
from engine.graphs.port import reproduces
from engine.graphs.result import UpdateResult
from engine.graphs.select import BACKEND_VARIABLE, backend_name, new_backend
from engine.graphs.topology import Call, Kind, Ref, TensorSpec, Topology, compare, signature


@pytest.mark.parametrize(
    ("device", "asked", "name"),
    [
        ("cpu", None, "tape"),
        ("cpu", "", "tape"),
        ("cpu", "tape", "tape"),
        ("cpu", "aoti", "aoti"),
        ("cuda", None, "cuda"),
        ("cuda", "cuda", "cuda"),
    ],
)
def test_the_device_decides_unless_the_operator_does(device: str, asked: str | None, name: str) -> None:
    assert backend_name(device, asked) == name


@pytest.mark.parametrize(("device", "asked"), [("cpu", "cuda"), ("cuda", "tape"), ("cuda", "aoti"), ("cpu", "Tape")])
def test_what_cannot_work_is_refused(device: str, asked: str) -> None:
    with pytest.raises(BackendUnavailableError, match=BACKEND_VARIABLE):
        backend_name(device, asked)


def test_the_environment_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tape", "aoti"):
        monkeypatch.setenv(BACKEND_VARIABLE, name)
        assert new_backend(torch.device("cpu")).name == name


def test_equal_to_the_bit_means_bits() -> None:
    nan, zeros = torch.tensor([float("nan")]), torch.zeros(1)
    assert reproduces(nan, nan.clone(), 0)
    assert not reproduces(zeros, -zeros, 0)
    assert reproduces(torch.ones(()), torch.ones(()), 0)
    assert reproduces(torch.ones(3, 2).t(), torch.ones(2, 3), 0)
    assert not reproduces(torch.tensor([1, 2]), torch.tensor([1, 3]), 0.9)


def test_a_tolerance_is_a_share_of_the_largest_value() -> None:
    eager = torch.tensor([1000.0, 1.0])
    assert reproduces(eager, eager + 0.9, 1e-3)
    assert not reproduces(eager, eager + 1.1, 1e-3)
    assert not reproduces(eager, torch.tensor([float("nan"), 1.0]), 1e-3)
    assert reproduces(torch.zeros(0), torch.zeros(0), 1e-3)


def _topology(*args: object, op: str = "aten.add.Tensor", kind: Kind = Kind.COMPUTE, shape: int = 2) -> Topology:
    spec = TensorSpec("float32", (shape,), (1,), "cpu")
    return Topology((spec, spec), {}, (Call(op, kind, args, {}, (2,), listed=False),), 3)


@pytest.mark.parametrize(
    ("other", "result"),
    [
        (_topology(Ref(0), 1), UpdateResult.SUCCESS),
        (_topology(Ref(1), 1), UpdateResult.TOPOLOGY_CHANGED),
        (_topology(Ref(0), Ref(1)), UpdateResult.TOPOLOGY_CHANGED),
        (_topology(Ref(0), 1, kind=Kind.VIEW), UpdateResult.NODE_TYPE_CHANGED),
        (_topology(Ref(0), 1, op="aten.sub.Tensor"), UpdateResult.FUNCTION_CHANGED),
        (_topology(Ref(0), 1, shape=3), UpdateResult.ATTRIBUTES_CHANGED),
        (_topology(Ref(0), 2), UpdateResult.PARAMETERS_CHANGED),
        # Equal to Python, not to an operation.
        (_topology(Ref(0), True), UpdateResult.PARAMETERS_CHANGED),
        (_topology(Ref(0), 1.0), UpdateResult.PARAMETERS_CHANGED),
    ],
)
def test_topologies_are_compared_and_signed_alike(other: Topology, result: UpdateResult) -> None:
    bound = _topology(Ref(0), 1)
    assert compare(bound, other) is result
    assert (signature(bound) == signature(other)) is (result is UpdateResult.SUCCESS)
