"""Buckets, KV signatures and latency windows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.bucket import Bucket, all_buckets, choose_bucket
from engine.build import RuntimeOptions
from engine.kv import KvLayout, kv_signature
from engine.llama import parse_config
from engine.metrics import WINDOW_STEPS, Window
from engine.testing import tiny_config

RUNTIME = RuntimeOptions()


def test_every_combination_but_the_empty_one_is_captured() -> None:
    buckets = all_buckets(RUNTIME)
    assert len(buckets) == len(set(buckets)) == 14
    assert Bucket(0, 0, 256) not in buckets
    assert Bucket(4, 16, 512).logits_rows == 5
    assert Bucket(4, 0, 512).logits_rows == 4


@given(st.integers(0, 4), st.booleans(), st.integers(1, 512))
def test_the_chosen_bucket_is_captured_and_the_smallest_that_holds(rows: int, prefill: bool, context: int) -> None:
    if not rows and not prefill:
        return
    chosen = choose_bucket(RUNTIME, decode_rows=rows, prefill=prefill, context=context)
    fitting = [
        bucket
        for bucket in all_buckets(RUNTIME)
        if bucket.decode_rows >= rows and bool(bucket.prefill_rows) == prefill and bucket.context >= context
    ]
    assert chosen == min(fitting, key=lambda bucket: (bucket.context, bucket.decode_rows))


def test_kv_signature_tells_whatever_changes_kv() -> None:
    config = parse_config(tiny_config())
    layout = KvLayout.of(config, RUNTIME)
    base = kv_signature(config, layout)
    others = [
        kv_signature(replace(config, rope_theta=1e6), layout),
        kv_signature(replace(config, kv_heads=1), layout),
        kv_signature(replace(config, rms_norm_eps=1e-6), layout),
        kv_signature(config, replace(layout, blocks=7)),
        kv_signature(config, replace(layout, block_tokens=8)),
        kv_signature(config, replace(layout, dtype="bfloat16")),
    ]
    assert kv_signature(parse_config(tiny_config()), KvLayout.of(config, RUNTIME)) == base
    assert len({base, *others}) == 1 + len(others)


def test_the_automatic_pool_holds_full_sequences_and_half_as_many_again() -> None:
    config = parse_config(tiny_config())
    layout = KvLayout.of(config, RUNTIME)
    assert layout.capacity_tokens == 1.5 * RUNTIME.batch_sizes[-1] * RUNTIME.contexts[-1]
    asked = KvLayout.of(config, RuntimeOptions(kv_blocks=5, kv_block_tokens=32))
    assert (asked.blocks, asked.capacity_tokens) == (5, 160)


def test_a_window_forgets_what_is_old() -> None:
    window = Window()
    assert window.percentile(99) == 0
    for value in range(WINDOW_STEPS + 100):
        window.add(float(value))
    assert window.percentile(0) == 100
    assert window.percentile(100) == WINDOW_STEPS + 99
    assert window.percentile(50) == 100 + WINDOW_STEPS / 2
