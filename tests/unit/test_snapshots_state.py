"""Tensor digests: the digest of the bytes, whichever thread computed it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from snapshots.capture.state import digest_tensors


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
