"""Named tensors: each storage once, by chunks, whatever their strides and types."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash

torch = pytest.importorskip("torch")

from snapshots.capture.state import hash_tensors  # noqa: E402 - only where torch is
from snapshots.device import tensors as tensors_module  # noqa: E402
from snapshots.device.hash import hash_tensor  # noqa: E402
from snapshots.device.tensors import named_tensors, raw_bytes, tensor_states  # noqa: E402
from snapshots.tensor_chunks import changed_chunks, rows_of_chunks  # noqa: E402


class _Tied(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6.0), persistent=False)


def test_every_parameter_and_buffer_by_name() -> None:
    model = _Tied()
    states = tensor_states(named_tensors(model))
    assert set(states) == {
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "head.weight",
        "table",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert states["head.weight"].alias == "embed.weight"
    assert states["head.weight"].digest == states["embed.weight"].digest
    assert states["norm.num_batches_tracked"].shape == ()
    assert states["table"].digest == xxhash.xxh3_128_hexdigest(model.table.numpy().tobytes())
    with torch.no_grad():
        model.embed.weight[3, 1] += 1
        model.norm.running_var[0] += 1
    after = tensor_states(named_tensors(model))
    assert {name for name in states if states[name] != after[name]} == {
        "embed.weight",
        "head.weight",
        "norm.running_var",
    }


def test_each_storage_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[list[str]] = []

    def count(found: Any, *, threads_max: int) -> Any:
        hashed.append(list(found))
        return hash_tensors(found, threads_max=threads_max)

    monkeypatch.setattr(tensors_module, "hash_tensors", count)
    base = torch.arange(24.0)
    named = {"a": base, "b": base, "t": base.view(4, 6).t(), "bits": base.view(torch.int32), "part": base[:12]}
    states = tensor_states(named)
    assert hashed == [["a", "part"]]
    assert {name: state.alias for name, state in states.items()} == {
        "a": "",
        "b": "a",
        "t": "a",
        "bits": "a",
        "part": "",
    }
    assert (states["bits"].dtype, states["t"].shape) == ("int32", (6, 4))
    assert states["part"].digest != states["a"].digest


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.randn(6, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.arange(10)[::3],
        torch.ones(1, 4).expand(3, 4),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["permuted", "scalar", "empty", "bfloat16", "bool", "complex", "conjugate", "strided", "expanded", "parameter"],
)
def test_bytes_of_any_tensor(tensor: Any) -> None:
    raw = raw_bytes("x", tensor)
    assert raw.numel() == tensor.numel() * tensor.element_size()
    assert (raw.dtype, raw.dim()) == (torch.uint8, 1)
    state = tensor_states({"x": tensor})["x"]
    assert state.digest == xxhash.xxh3_128_hexdigest(raw.numpy().tobytes())
    assert state.shape == tuple(tensor.shape)


def test_dense_tensors_are_not_copied() -> None:
    base = torch.arange(24.0)
    for view in (base, base.view(4, 6).t(), base.view(2, 3, 4).permute(1, 2, 0)):
        assert raw_bytes("x", view).data_ptr() == base.data_ptr()


@pytest.mark.parametrize("bad", [torch.zeros(2, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"])
def test_tensors_without_bytes_are_refused_by_name(bad: Any) -> None:
    with pytest.raises(ValueError, match="tensor w"):
        tensor_states({"w": bad})


def test_changed_rows_are_named() -> None:
    rows, columns = 3000, 1024  # 4 KiB a row: 256 rows a chunk
    weight = torch.zeros(rows, columns)
    before = tensor_states({"w": weight}, threads_max=4)["w"]
    weight[700, 5] = -0.0
    weight[2999, 0] = 1
    after = tensor_states({"w": weight})["w"]
    changed = changed_chunks(before, after)
    assert changed == (2, 11)
    assert rows_of_chunks(after.shape, 4, changed) == ((512, 768), (2816, 3000))
    assert hash_tensor(raw_bytes("w", weight)).digest != after.digest  # another hash, not comparable
