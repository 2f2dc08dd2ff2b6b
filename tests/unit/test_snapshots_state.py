"""Tensor digests: the digest of the bytes, whichever thread computed it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from snapshots.capture.state import digest_tensors, hash_tensors
from snapshots.model import TensorState
from snapshots.tensor_chunks import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    TensorHasher,
    changed_chunks,
    rows_of_chunks,
    whole_digest,
)


@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=300)))
def test_digest_of_the_bytes_in_order(tensors: dict[str, bytes]) -> None:
    found = digest_tensors({name: np.frombuffer(data, np.uint8) for name, data in tensors.items()})
    assert found == {name: xxhash.xxh3_128_hexdigest(data) for name, data in tensors.items()}
    assert list(found) == list(tensors)


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(1)
    tensors = {f"t{n}": rng.integers(0, 255, (n + 1) << 20, dtype=np.uint8) for n in range(7)}
    found = digest_tensors(tensors, threads_max=2)
    assert found == digest_tensors(tensors)
    assert list(found) == list(tensors)


@pytest.mark.parametrize("at", [0, 4096, (20 << 20) - 1])
def test_one_bit_shows(at: int) -> None:
    data = np.zeros(20 << 20, np.uint8)
    before = digest_tensors({"w": data})
    data[at] ^= 0x80
    assert digest_tensors({"w": data}) != before


@pytest.mark.parametrize("bad", [np.zeros((2, 2), np.uint8), np.zeros(4, np.int8), np.zeros(8, np.uint8)[::2]])
def test_other_arrays_are_refused(bad: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="tensor w"):
        digest_tensors({"w": bad})
    with pytest.raises(ValueError, match="tensor w"):
        hash_tensors({"w": bad})


def _random(size: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 20 << 20])
@pytest.mark.parametrize("threads", [1, 4])
def test_chunk_digests(size: int, threads: int) -> None:
    data = _random(size)
    found = hash_tensors({"w": data, "v": _random(17 << 20)}, threads_max=threads)["w"]
    pieces = [data[at : at + CHUNK_BYTES].tobytes() for at in range(0, size, CHUNK_BYTES)] or [b""]
    assert found.chunks == b"".join(map(xxhash.xxh3_128_digest, pieces))
    assert found.digest == whole_digest(found.chunks)
    if size <= CHUNK_BYTES:
        assert found.digest == digest_tensors({"w": data})["w"]


@pytest.mark.parametrize("size", [0, 5, CHUNK_BYTES, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 77])
@pytest.mark.parametrize("piece", [CHUNK_BYTES, 1000003, 300_000, 3 * CHUNK_BYTES])
def test_hashing_by_pieces_is_the_same(size: int, piece: int) -> None:
    data = _random(size)
    hasher = TensorHasher()
    for at in range(0, size, piece):
        hasher.update(data[at : at + piece].data)
    assert hasher.digest() == hash_tensors({"w": data})["w"]
    assert hasher.hexdigest() == hasher.digest().digest


def test_a_changed_byte_changes_one_chunk() -> None:
    data = _random(5 * CHUNK_BYTES + 3)
    before = hash_tensors({"w": data})["w"]
    data[3 * CHUNK_BYTES + 9] ^= 1
    data[-1] ^= 1
    after = hash_tensors({"w": data})["w"]
    states = [TensorState(found.digest, "uint8", (len(data),), chunks=found.chunks) for found in (before, after)]
    assert before.digest != after.digest
    assert changed_chunks(*states) == (3, 5)
    assert changed_chunks(states[0], states[0]) == ()


def test_chunks_that_cannot_be_compared() -> None:
    chunks = bytes(2 * DIGEST_BYTES)
    state = TensorState("aa", "uint8", (4,), chunks=chunks)
    for other in (
        TensorState("aa", "uint8", (5,), chunks=chunks),
        TensorState("aa", "int8", (4,), chunks=chunks),
        TensorState("aa", "uint8", (4,), chunks=chunks, hash="nh"),
        TensorState("aa", "uint8", (4,)),
        TensorState("aa", "uint8", (4,), chunks=bytes(DIGEST_BYTES)),
    ):
        assert changed_chunks(state, other) is None
        assert changed_chunks(other, state) is None


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
def test_rows_cover_the_changed_byte(shape: list[int], item_bytes: int, data: st.DataObject) -> None:
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * item_bytes
    at = data.draw(st.integers(0, shape[0] * row_bytes - 1))
    ((first, end),) = rows_of_chunks(tuple(shape), item_bytes, (at // CHUNK_BYTES,))
    assert first <= at // row_bytes < end <= shape[0]
    # No more than the chunk and the two rows it cuts.
    assert (end - first - 2) * row_bytes <= CHUNK_BYTES


def test_rows_of_tensors_without_rows() -> None:
    assert rows_of_chunks((), 4, (0,)) == ((0, 1),)
    assert rows_of_chunks((0, 5), 4, (0,)) == ()
    assert rows_of_chunks((3, 0), 4, (0,)) == ()
    assert rows_of_chunks((1024, 1024), 4, (0, 1, 3)) == ((0, 512), (768, 1024))
