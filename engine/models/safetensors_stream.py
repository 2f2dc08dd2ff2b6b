"""A safetensors file written tensor by tensor, so that peak memory is one block and not the whole model.

The ``safetensors`` package serialises from a dict of live tensors. The format itself is small
(https://github.com/huggingface/safetensors#format): a little-endian u64 header length, a JSON header,
then the raw data in header order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

# Data that starts on a cache line can be mapped and used in place by every kernel.
_ALIGN_BYTES = 64
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class FloatTensor:
    """A float32 tensor to be written: its blocks, concatenated, are the row-major data of ``shape``."""

    name: str
    shape: tuple[int, ...]
    blocks: Iterable[NDArray[np.float32]]

    @property
    def size_bytes(self) -> int:
        """Bytes of the data."""
        return int(np.prod(self.shape, dtype=np.int64)) * 4


def write_float32(out: BinaryIO, tensors: list[FloatTensor]) -> Iterator[int]:
    """Write a whole file; yields the data bytes written so far after each block.

    Raises:
        ValueError: a tensor's blocks do not add up to its shape.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        header[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGN_BYTES)
    out.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    written = 0
    for tensor in tensors:
        end = written + tensor.size_bytes
        for block in tensor.blocks:
            written += out.write(np.ascontiguousarray(block, dtype="<f4").data)
            yield written
        if written != end:
            raise ValueError(f"{tensor.name}: wrote {written - end + tensor.size_bytes} bytes of {tensor.size_bytes}")
