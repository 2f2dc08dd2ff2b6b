"""What storing a model's tensors costs: the first snapshot, the second identical one, one with 1 % changed."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from snapshots.capture.state import hash_tensors
from snapshots.model import GenerationState, HostSnapshot, TensorState
from snapshots.store.store import SnapshotStore, Stored
from snapshots.store.writer import TensorSource, pieces_of

_TENSOR_BYTES = 4 << 20
_MS = 1e3
_MIB = 1 << 20
# 1 % of the tensors get one changed byte each.
_CHANGED_SHARE = 0.01

Bytes = npt.NDArray[np.uint8]


def measure_store(mib: int, rounds: int) -> dict[str, float]:
    """Milliseconds (median of ``rounds``) and bytes of storing ``mib`` MiB of incompressible tensors.

    Each figure includes the hashing of all tensors: a snapshot needs it. ``read_ms`` is this run's limit: every
    tensor read once (a sum over 8-byte words).
    """
    tensors = {f"t{i}": _random() for i in range(max(1, mib * _MIB // _TENSOR_BYTES))}
    changed = dict(tensors)
    for name in list(tensors)[:: int(1 / _CHANGED_SHARE)]:
        changed[name] = tensors[name].copy()
        changed[name][0] ^= 1
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            store = SnapshotStore(Path(folder))
            timed = {"first": tensors, "second": tensors, "changed": changed}
            for name, content in timed.items():
                start_s = time.perf_counter()
                stored = _store(store, content)
                found.setdefault(f"{name}_ms", []).append((time.perf_counter() - start_s) * _MS)
                found.setdefault(f"{name}_new_bytes", []).append(stored.new_bytes)
            start_s = time.perf_counter()
            assert not store.verify().damaged
            found.setdefault("verify_ms", []).append((time.perf_counter() - start_s) * _MS)
        start_s = time.perf_counter()
        for data in tensors.values():
            int(data.view(np.uint64).sum())
        found.setdefault("read_ms", []).append((time.perf_counter() - start_s) * _MS)
    figures = {name: float(np.median(values)) for name, values in found.items()}
    return {
        "content_bytes": float(sum(data.nbytes for data in tensors.values())),
        **figures,
        "second_of_read_limit": figures["read_ms"] / figures["second_ms"],
    }


def _random() -> Bytes:
    seed = np.frombuffer(secrets.token_bytes(8), dtype=np.uint64)
    return np.random.default_rng(seed).integers(0, 256, _TENSOR_BYTES, dtype=np.uint8)


def _store(store: SnapshotStore, tensors: dict[str, Bytes]) -> Stored:
    digests = hash_tensors(tensors)
    states = {name: TensorState(found.digest, "uint8", (_TENSOR_BYTES,)) for name, found in digests.items()}
    snapshot = HostSnapshot(time.time_ns(), 1, (GenerationState(1, "sha256:bench", states),), {})

    def source(name: str) -> TensorSource:
        def read() -> Iterator[memoryview]:
            return pieces_of(tensors[name].data)

        return TensorSource(1, name, 0, digests[name].digest, _TENSOR_BYTES, read)

    return store.add(snapshot, [source(name) for name in tensors])
