"""Safe parsing of safetensors headers. Pure.

Format (huggingface/safetensors README): u64 little-endian header length, a JSON object of tensor name →
dtype, shape, data_offsets relative to the end of the header, then the data. As in the reference
implementation the tensors must tile the data exactly, so no byte of a file is outside a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

# The largest published headers (hundreds of experts) are about 2 MiB.
HEADER_BYTES_MAX: Final = 16 << 20
# torch's own limit; bounds the multiplication a hostile shape can cause.
RANK_MAX: Final = 64
LENGTH_BYTES: Final = 8
_DTYPE_BITS: Final = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class SafetensorsInvalidError(ValueError):
    """The file is not a sound safetensors file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor. ``offset`` counts from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. ``raw`` is the file up to the first data byte; tensors are in data order."""

    raw: bytes
    tensors: tuple[TensorEntry, ...]


def tensor_size_bytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor, or None for an unknown dtype, a bad shape, or a size that is no whole byte."""
    bits = _DTYPE_BITS.get(dtype)
    if bits is None or len(shape) > RANK_MAX or any(dim < 0 for dim in shape):
        return None
    for dim in shape:
        bits *= dim
    return None if bits % 8 else bits // 8


def parse_header(raw: bytes, file_size_bytes: int) -> Header:
    """Parse the first bytes of a file, up to the end of its header.

    Raises:
        SafetensorsInvalidError: not JSON, duplicate name, unknown dtype, tensors that overlap, leave gaps or leave the
            file.
    """
    try:
        table = json.loads(raw[LENGTH_BYTES:], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SafetensorsInvalidError(f"the header does not parse: {error}") from error
    if not isinstance(table, dict):
        raise SafetensorsInvalidError("the header is not an object")
    table.pop("__metadata__", None)
    entries = [_entry(name, fields, len(raw)) for name, fields in table.items()]
    # Empty tensors share their offset with a neighbour: the size decides, then the name.
    entries.sort(key=lambda entry: (entry.offset, entry.size_bytes, entry.name))
    at = len(raw)
    for entry in entries:
        if entry.offset != at:
            raise SafetensorsInvalidError(f"{entry.name} overlaps another tensor or leaves a gap")
        at += entry.size_bytes
    if at != file_size_bytes:
        raise SafetensorsInvalidError(f"the tensors end at byte {at}, the file at {file_size_bytes}")
    return Header(raw=raw, tensors=tuple(entries))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise SafetensorsInvalidError("the header names something twice")
    return table


def _entry(name: str, fields: Any, data_offset: int) -> TensorEntry:
    match fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end], **rest} if not rest:
            # bool is an int to isinstance, not here.
            whole = all(type(number) is int for number in (*shape, start, end))
            if whole and 0 <= start <= end and tensor_size_bytes(dtype, shape) == end - start:
                return TensorEntry(name, dtype, tuple(shape), data_offset + start, end - start)
    raise SafetensorsInvalidError(f"{name}: bad dtype, shape or offsets")
