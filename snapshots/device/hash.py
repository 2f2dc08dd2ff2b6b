"""A hash that runs where the tensor lives: integer torch operations, the same on CPU and GPU. Not run on a GPU.

Shipping a model's weights to the host just to hash them takes the bus's time; this ships 16 bytes per 64 KiB. Each
block is hashed by NH (Black et al., UMAC, CRYPTO '99; RFC 4418 section 5.2.2): words of 32 bits, keys added mod 2³²,
neighbouring sums multiplied to 64 bits, products added mod 2⁶⁴. Two blocks of the same length that differ collide with
probability 2⁻³² over the keys, whatever differs; a second pass with shifted keys squares that. Cheaper candidates do
not hold: xor misses equal changes in two places, and sums of key times word miss sign flips of bfloat16 pairs.

The keys are fixed, so that digests can be compared across processes: it finds changes, it does not stop a forger.
"""

from __future__ import annotations

import functools
import hashlib

import torch
import xxhash

from snapshots.tensor_chunks import CHUNK_BYTES, TensorDigest, whole_digest

BLOCK_BYTES = 64 << 10
_WORD_BYTES = 8  # two words of 32 bits
_BLOCK_WORDS = BLOCK_BYTES // _WORD_BYTES
# RFC 4418's Toeplitz shift between passes: four words of 32 bits.
_SHIFT = 2
_LOW = 0xFFFFFFFF
_BLOCKS_PER_CHUNK = CHUNK_BYTES // BLOCK_BYTES
_LANE_BYTES = 16
# Blocks hashed at once. The passes need about four times their size for intermediates: 2 MiB stay in a CPU's cache;
# 64 MiB fill a GPU and leave its memory alone.
_SLAB_BLOCKS = {"cpu": 8, "cuda": 1024}


@functools.cache
def key_words() -> tuple[int, ...]:
    """The key: words of 32 bits, from SHAKE-128 of a fixed name."""
    count = 2 * (_BLOCK_WORDS + _SHIFT)
    stream = hashlib.shake_128(b"patchctl device hash 1").digest(4 * count)
    return tuple(int.from_bytes(stream[at : at + 4], "little") for at in range(0, len(stream), 4))


@functools.cache
def _keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.tensor(key_words(), dtype=torch.int64)
    return words[0::2].to(device), words[1::2].to(device)


def _nh(words: torch.Tensor, shift: int) -> torch.Tensor:
    """NH of int64 ``[blocks, _BLOCK_WORDS]``; int64 ``[blocks]``. Products and sums wrap, as intended."""
    low_keys, high_keys = _keys(words.device)
    low = (words & _LOW) + low_keys[shift : shift + _BLOCK_WORDS] & _LOW
    high = (words >> 32) + high_keys[shift : shift + _BLOCK_WORDS] & _LOW
    return (low * high).sum(1)


def hash_blocks(raw: torch.Tensor) -> torch.Tensor:
    """Hash a byte tensor block by block, on its own device.

    Args:
        raw: uint8 ``[n]``, contiguous. The last block is hashed as if zeros followed.

    Returns:
        int64 ``[blocks, 2]`` on the same device; no block for no bytes.

    Raises:
        ValueError: another dtype or shape.
    """
    if raw.dtype != torch.uint8 or raw.dim() != 1 or not raw.is_contiguous():
        raise ValueError(f"expected a contiguous 1-D uint8 tensor, got {raw.dtype} {tuple(raw.shape)}")
    blocks = -(-raw.numel() // BLOCK_BYTES)
    out = torch.empty((blocks, 2), dtype=torch.int64, device=raw.device)
    slab = _SLAB_BLOCKS.get(raw.device.type, _SLAB_BLOCKS["cuda"])
    for first in range(0, blocks, slab):
        count = min(slab, blocks - first)
        words = _words(raw[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES], count)
        out[first : first + count, 0] = _nh(words, 0)
        out[first : first + count, 1] = _nh(words, _SHIFT)
    return out


def _words(raw: torch.Tensor, blocks: int) -> torch.Tensor:
    """Bytes as int64 ``[blocks, _BLOCK_WORDS]``; copied only where they are short or not aligned."""
    if raw.numel() < blocks * BLOCK_BYTES:
        padded = torch.zeros(blocks * BLOCK_BYTES, dtype=torch.uint8, device=raw.device)
        padded[: raw.numel()] = raw
        raw = padded
    elif raw.storage_offset() % _WORD_BYTES or raw.data_ptr() % _WORD_BYTES:
        raw = raw.clone()
    return raw.view(torch.int64).view(blocks, _BLOCK_WORDS)


def hash_tensor(raw: torch.Tensor) -> TensorDigest:
    """Digests of a byte tensor by chunks of 1 MiB, hashed where it lives.

    A chunk's digest is the xxh3_128 of its length and its blocks' hashes; only those cross to the host.

    Args:
        raw: uint8 ``[n]``, contiguous.

    Raises:
        ValueError: another dtype or shape.
    """
    lanes = hash_blocks(raw).cpu().numpy().astype("<i8").tobytes()
    step = _BLOCKS_PER_CHUNK * _LANE_BYTES
    chunks = []
    for index in range(max(1, -(-raw.numel() // CHUNK_BYTES))):
        size = min(CHUNK_BYTES, raw.numel() - index * CHUNK_BYTES)
        chunks.append(xxhash.xxh3_128_digest(size.to_bytes(8, "little") + lanes[index * step : (index + 1) * step]))
    packed = b"".join(chunks)
    return TensorDigest(whole_digest(packed), packed)
