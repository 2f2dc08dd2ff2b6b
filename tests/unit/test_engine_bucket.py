"""Buckets, KV signatures and latency windows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.bucket import Bucket, all_buckets, choose_bucket
from engine.build import RuntimeOptions
from engine.kv import KvShape, kv_signature
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
    config, shape = parse_config(tiny_config()), KvShape(4, 64)
    base = kv_signature(config, shape, "float32")
    others = [
        kv_signature(replace(config, rope_theta=1e6), shape, "float32"),
        kv_signature(replace(config, kv_heads=1), shape, "float32"),
        kv_signature(replace(config, rms_norm_eps=1e-6), shape, "float32"),
        kv_signature(config, KvShape(4, 128), "float32"),
        kv_signature(config, KvShape(8, 64), "float32"),
        kv_signature(config, shape, "bfloat16"),
    ]
    assert kv_signature(parse_config(tiny_config()), KvShape(4, 64), "float32") == base
    assert len({base, *others}) == 1 + len(others)


def test_a_window_forgets_what_is_old() -> None:
    window = Window()
    assert window.percentile(99) == 0
    for value in range(WINDOW_STEPS + 100):
        window.add(float(value))
    assert window.percentile(0) == 100
    assert window.percentile(100) == WINDOW_STEPS + 99
    assert window.percentile(50) == 100 + WINDOW_STEPS / 2
