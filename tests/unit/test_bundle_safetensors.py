from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from patchctl.bundle.safetensors import SafetensorsInvalidError, parse_header, tensor_size_bytes
from patchctl.bundle.tensor_files import changed_tensors, read_header
from patchctl.bundle.testing import safetensors_bytes
from patchctl.store.files import reading


def _raw(table: Any) -> bytes:
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(header).to_bytes(8, "little") + header


def _tensor(start: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_offsets_count_from_the_start_of_the_file() -> None:
    raw = _raw({"__metadata__": {"format": "pt"}, "b": _tensor(4, 12, "F32", [2, 1]), "a": _tensor(0, 4)})
    header = parse_header(raw, len(raw) + 12)
    assert [(t.name, t.offset - len(raw), t.size_bytes) for t in header.tensors] == [("a", 0, 4), ("b", 4, 8)]


def test_empty_tensors_and_scalars() -> None:
    raw = _raw({"z": _tensor(0, 0), "s": _tensor(0, 4, "F32", []), "e": _tensor(4, 4, "F16", [3, 0])})
    assert [t.name for t in parse_header(raw, len(raw) + 4).tensors] == ["z", "s", "e"]


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
        {},
        {"a": 1},
        {"a": _tensor(0, 3)},
        {"a": _tensor(0, 5)},
        {"a": _tensor(1, 4)},
        {"a": _tensor(0, 2), "b": _tensor(3, 4)},
        {"a": _tensor(0, 3), "b": _tensor(2, 4)},
        {"a": _tensor(0, 4), "b": _tensor(0, 4)},
        {"a": _tensor(0, 2), "b": _tensor(1, 3)},
        {"a": _tensor(0, 2), "b": _tensor(4, 6)},
        {"a": _tensor(2, 4), "b": _tensor(4, 6)},
        {"a": _tensor(0, 4, "F31")},
        {"a": _tensor(0, 4, "F32", [2])},
        {"a": _tensor(0, 4, "U8", [-2, -2])},
        {"a": _tensor(0, 4, "U8", [4.0])},
        {"a": _tensor(0, 4, "U8", [True, 4])},
        {"a": _tensor(0, 4, "U8", [1] * 65 + [4])},
        {"a": _tensor(4, 0, "U8", [4])},
        {"a": _tensor(-4, 0, "U8", [4])},
        {"a": {**_tensor(0, 4), "extra": 1}},
        {"a": {"dtype": "U8", "shape": [4]}},
    ],
)
def test_bad_headers_are_refused(table: Any) -> None:
    raw = _raw(table)
    with pytest.raises(SafetensorsInvalidError):
        parse_header(raw, len(raw) + 4)


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 8, (2**63).to_bytes(8, "little"), b"\x09" + bytes(15)])
def test_bad_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with reading(tmp_path / "f") as fd, pytest.raises(SafetensorsInvalidError):
        read_header(fd)


def test_sub_byte_dtypes_need_whole_bytes() -> None:
    assert tensor_size_bytes("F4", [3, 2]) == 3
    assert tensor_size_bytes("F4", [3]) is None
    assert tensor_size_bytes("BF16", [3]) == 6


def test_changed_tensors_finds_single_bytes_across_block_borders(tmp_path: Path) -> None:
    size = (1 << 20) + 5
    old = {"a": bytes(size), "b": bytes(size), "c": bytes(size)}
    new = {"a": bytes(size - 1) + b"\1", "b": bytes(size), "c": b"\1" + bytes(size - 1)}
    (tmp_path / "old").write_bytes(safetensors_bytes(old))
    (tmp_path / "new").write_bytes(safetensors_bytes(new))
    with reading(tmp_path / "old") as old_fd, reading(tmp_path / "new") as new_fd:
        assert [t.name for t in changed_tensors(old_fd, new_fd, read_header(new_fd))] == ["a", "c"]


def test_agrees_with_the_reference_implementation(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    reference = pytest.importorskip("safetensors.numpy")
    arrays = {"w": numpy.arange(12, dtype="float32").reshape(3, 4), "b": numpy.ones(3, dtype="int16")}
    reference.save_file(arrays, tmp_path / "f")
    with reading(tmp_path / "f") as fd:
        found = {t.name: t for t in read_header(fd).tensors}
    content = (tmp_path / "f").read_bytes()
    for name, array in arrays.items():
        entry = found[name]
        assert content[entry.offset : entry.offset + entry.size_bytes] == array.tobytes()
        assert entry.shape == array.shape
