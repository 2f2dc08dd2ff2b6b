"""Digests of named tensors, at memory read speed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from snapshots.tensor_chunks import CHUNK_BYTES, DIGEST_BYTES, TensorDigest, whole_digest

# xxh3 keeps up with one core's memory reads (15 GB/s measured), and xxhash lets other threads run meanwhile. A second
# thread helps only where a core is idle: beside a busy engine on 2 cores both took the same time. Beyond four, memory
# bandwidth is used up on every machine we know, and serving needs some of it.
_THREADS_MAX = 4
# Below this, starting a thread costs more than it hashes (about 1 ms of hashing).
_THREADED_BYTES_MIN = 16 << 20

_Bytes = npt.NDArray[np.uint8]
_Item = TypeVar("_Item")


def _check(tensors: Mapping[str, _Bytes]) -> None:
    for name, data in tensors.items():
        if data.ndim != 1 or data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ValueError(f"tensor {name}: expected a contiguous 1-D uint8 array, got {data.dtype} {data.shape}")


def _for_each(items: list[_Item], work: Callable[[_Item], None], threads: int) -> None:
    """Do ``work`` for every item; the calling thread takes part, and each thread takes the next item that is left."""
    remaining: Iterator[_Item] = iter(items)  # one step of a list iterator is atomic

    def drain() -> None:
        for item in remaining:
            work(item)

    if threads < 2:  # noqa: PLR2004 - one thread is the caller
        drain()
        return
    with ThreadPoolExecutor(threads - 1, thread_name_prefix="tensor-digest") as pool:
        helpers = [pool.submit(drain) for _ in range(threads - 1)]
        drain()
    for helper in helpers:
        helper.result()


def _threads(tensors: Mapping[str, _Bytes], threads_max: int) -> int:
    if sum(data.nbytes for data in tensors.values()) < _THREADED_BYTES_MIN:
        return 1
    return max(1, min(_THREADS_MAX, threads_max, len(os.sched_getaffinity(0))))


def hash_tensors(tensors: Mapping[str, _Bytes], *, threads_max: int = 1) -> dict[str, TensorDigest]:
    """Digests of each tensor's bytes by chunks of 1 MiB, in the mapping's order.

    Threads share the chunks of all tensors, so that one large embedding does not keep the others waiting.

    Args:
        tensors: name → 1-D contiguous uint8 view of the tensor's memory (no copy is made). Pass each storage
            once: an alias has the digest of the tensor it shares memory with.
        threads_max: at most this many; more than 1 only where cores are idle.

    Returns:
        name → digests. The same bytes give the same digests on every machine. They find changes; they are not proof
        against someone who forges them.

    Raises:
        ValueError: an array is not 1-D, contiguous and uint8.
    """
    _check(tensors)
    chunks = {name: bytearray(DIGEST_BYTES * max(1, -(-data.nbytes // CHUNK_BYTES))) for name, data in tensors.items()}
    pieces = [
        (chunks[name], data.data, index)
        for name, data in tensors.items()
        for index in range(len(chunks[name]) // DIGEST_BYTES)
    ]

    def work(piece: tuple[bytearray, memoryview, int]) -> None:
        out, data, index = piece
        digest = xxhash.xxh3_128_digest(data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        out[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = digest

    _for_each(pieces, work, _threads(tensors, threads_max))
    return {name: TensorDigest(whole_digest(bytes(found)), bytes(found)) for name, found in chunks.items()}


def digest_tensors(tensors: Mapping[str, _Bytes], *, threads_max: int = 1) -> dict[str, str]:
    """Hex xxh3_128 of each tensor's bytes, in the mapping's order: one digest each, nothing about its parts.

    Args and errors as in :func:`hash_tensors`; a large tensor is hashed by one thread.
    """
    _check(tensors)
    digests = dict.fromkeys(tensors, "")

    def work(name: str) -> None:
        digests[name] = xxhash.xxh3_128_hexdigest(tensors[name].data)

    # Largest first: the threads then finish together, give or take the smallest tensor.
    order = sorted(tensors, key=lambda name: -tensors[name].nbytes)
    _for_each(order, work, _threads(tensors, threads_max))
    return digests
