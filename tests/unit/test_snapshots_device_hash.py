"""The device hash against plain integers, and against the changes that cheaper hashes miss. Run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from snapshots.device import hash as device_hash  # noqa: E402 - only where torch is
from snapshots.device.hash import BLOCK_BYTES, hash_blocks, hash_tensor, key_words  # noqa: E402
from snapshots.tensor_chunks import CHUNK_BYTES, DIGEST_BYTES  # noqa: E402

_MASK = (1 << 64) - 1


def _reference(block: bytes, shift: int) -> int:
    """NH by its definition, on Python's integers."""
    keys = key_words()[2 * shift :]
    block = block.ljust(BLOCK_BYTES, b"\0")
    total = 0
    for at in range(0, BLOCK_BYTES, 8):
        low, high = int.from_bytes(block[at : at + 4], "little"), int.from_bytes(block[at + 4 : at + 8], "little")
        first, second = keys[at // 4], keys[at // 4 + 1]
        total += ((low + first) % 2**32) * ((high + second) % 2**32)
    return total & _MASK


def _raw(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3 * BLOCK_BYTES))
def test_agrees_with_plain_integers(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    data = bytes(raw.numpy())
    found = hash_blocks(raw).tolist()
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, size, BLOCK_BYTES)]
    expected = [[_reference(block, 0), _reference(block, device_hash._SHIFT)] for block in blocks]
    assert [[word & _MASK for word in row] for row in found] == expected


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_agrees_at_the_extremes(byte: int) -> None:
    data = bytes([byte]) * BLOCK_BYTES
    (found,) = hash_blocks(_raw(data)).tolist()
    assert [word & _MASK for word in found] == [_reference(data, 0), _reference(data, device_hash._SHIFT)]


def _random_words(blocks: int, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (blocks, BLOCK_BYTES // 8), dtype=torch.int64, generator=generator)


def _one_bit(words: Any) -> None:
    words[:, 7] ^= 1


def _one_word(words: Any) -> None:
    words[:, 11] = 0


def _swap(words: Any) -> None:
    words[:, [3, 90]] = words[:, [90, 3]]


def _swap_halves(words: Any) -> None:
    words[:, 5] = (words[:, 5] << 32) | ((words[:, 5] >> 32) & 0xFFFFFFFF)


def _two_sign_bits(words: Any) -> None:
    words[:, 3] ^= -(2**63)
    words[:, 90] ^= -(2**63)


def _equal_xor(words: Any) -> None:
    words[:, 3] ^= 0x1234567
    words[:, 90] ^= 0x1234567


def _plus_and_minus(words: Any) -> None:
    words[:, 3] += 977
    words[:, 90] -= 977


def _rotate(words: Any) -> None:
    words[:] = words.roll(1, 1)


@pytest.mark.parametrize(
    "change",
    [_one_bit, _one_word, _swap, _swap_halves, _two_sign_bits, _equal_xor, _plus_and_minus, _rotate],
)
@pytest.mark.parametrize("lane", [0, 1])
def test_changes_that_cheaper_hashes_miss(change: Any, lane: int) -> None:
    words = _random_words(32)
    before = hash_blocks(words.view(-1).view(torch.uint8))
    change(words)
    after = hash_blocks(words.view(-1).view(torch.uint8))
    assert bool((before[:, lane] != after[:, lane]).all())


@pytest.mark.parametrize("step", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("lane", [0, 1])
def test_sign_flips_of_bfloat16(step: int, lane: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weights = (torch.randn(32, BLOCK_BYTES // 2, generator=generator) * 0.02).to(torch.bfloat16)
    flipped = weights.clone()
    flipped[:, ::step] *= -1
    before = hash_blocks(weights.view(-1).view(torch.uint8))
    after = hash_blocks(flipped.view(-1).view(torch.uint8))
    assert bool((before[:, lane] != after[:, lane]).all())


def test_every_word_counts() -> None:
    words = _random_words(1)
    (before,) = hash_blocks(words.view(-1).view(torch.uint8)).tolist()
    for at in (0, 1, 2, BLOCK_BYTES // 16, BLOCK_BYTES // 8 - 1):
        for flip in (1, 1 << 31, 1 << 32, -(2**63)):
            words[0, at] ^= flip
            (after,) = hash_blocks(words.view(-1).view(torch.uint8)).tolist()
            assert after[0] != before[0]
            assert after[1] != before[1]
            words[0, at] ^= flip


@pytest.mark.parametrize("offset", [0, 1, 4, 8, 13])
def test_alignment_and_slabs_change_nothing(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _random_words(6).view(-1).view(torch.uint8)
    raw = storage[offset : offset + 5 * BLOCK_BYTES + 100]
    expected = hash_blocks(raw.clone())
    assert torch.equal(hash_blocks(raw), expected)
    monkeypatch.setitem(device_hash._SLAB_BLOCKS, "cpu", 1)
    assert torch.equal(hash_blocks(raw), expected)


def test_length_is_part_of_the_digest() -> None:
    digests = {
        hash_tensor(_raw(bytes(size))).digest for size in (0, 1, 7, 8, BLOCK_BYTES, BLOCK_BYTES + 1, CHUNK_BYTES)
    }
    assert len(digests) == 7


def test_a_change_has_a_chunk() -> None:
    raw = _random_words(40).view(-1).view(torch.uint8)
    before = hash_tensor(raw)
    assert len(before.chunks) == 3 * DIGEST_BYTES
    raw[CHUNK_BYTES + 5] ^= 1
    after = hash_tensor(raw)
    parts = [before.chunks[at : at + DIGEST_BYTES] == after.chunks[at : at + DIGEST_BYTES] for at in (0, 16, 32)]
    assert parts == [True, False, True]
    assert before.digest != after.digest


@pytest.mark.parametrize(
    "bad", [torch.zeros(4), torch.zeros((2, 2), dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]]
)
def test_other_tensors_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="uint8"):
        hash_blocks(bad)
