"""A crash at any point of a write leaves every older snapshot whole, and the new one whole or absent."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshots.store.errors import StoreError
from snapshots.store.retention import Held, RetentionLimits, evictions, total_bytes
from snapshots.store.store import SnapshotStore
from snapshots.store.testing import CrashError, CrashingDisk, FullDisk, QuickDisk, add_sample, tensors_of

_LIMITS = RetentionLimits(snapshots_max=2)
_NEVER = 10**6
_SHARED, _FIRST, _SECOND, _THIRD = (bytes([i]) * 200 for i in range(1, 5))


def _tensors(own: bytes) -> dict[str, bytes]:
    return {"shared": _SHARED, "own": own}


@contextmanager
def _two_snapshots() -> Iterator[tuple[Path, list[str]]]:
    with tempfile.TemporaryDirectory() as folder:
        store = SnapshotStore(Path(folder), _LIMITS, QuickDisk())
        yield Path(folder), [add_sample(store, _tensors(own), at=at).id for at, own in ((1, _FIRST), (2, _SECOND))]


def _write(root: Path, disk: CrashingDisk) -> None:
    """A third snapshot, which evicts the first, and the removal of the second."""
    store = SnapshotStore(root, _LIMITS, disk)
    add_sample(store, _tensors(_THIRD), at=3)
    store.remove(store.identifiers()[0])


def _operations() -> list[str]:
    with _two_snapshots() as (root, _):
        disk = CrashingDisk(_NEVER)
        _write(root, disk)
        return disk.operations


@pytest.mark.parametrize("crash_at", range(len(_operations())))
@pytest.mark.parametrize("seed", range(4))
def test_every_prefix_of_a_write_leaves_whole_snapshots_only(crash_at: int, seed: int) -> None:
    with _two_snapshots() as (root, old):
        disk = CrashingDisk(crash_at)
        with pytest.raises(CrashError):
            _write(root, disk)
        disk.lose(random.Random(seed))  # noqa: S311 - a seed replays

        store = SnapshotStore(root, _LIMITS, QuickDisk())
        left = store.identifiers()
        assert store.verify().damaged == ()
        expected = dict(zip(old, (_FIRST, _SECOND), strict=True))
        for identifier in left:
            assert tensors_of(store, identifier) == _tensors(expected.get(identifier, _THIRD))
        new = [identifier for identifier in left if identifier not in old]
        assert new or left == tuple(old), "an old snapshot went although the new one is not stored"

        again = add_sample(store, _tensors(_THIRD), at=3)
        assert tensors_of(store, again.id) == _tensors(_THIRD)
        assert not list((root / "incoming").iterdir())
        manifests = [store.manifest(identifier) for identifier in store.identifiers()]
        assert {path.name for path in (root / "chunks").iterdir()} == set().union(*(m.chunks for m in manifests))


@settings(max_examples=60, deadline=None)
@given(bytes_left=st.integers(0, 4000), own=st.binary(min_size=1, max_size=1500))
def test_a_full_disk_costs_nothing_that_was_stored(bytes_left: int, own: bytes) -> None:
    with _two_snapshots() as (root, old):
        before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        refused, stored = None, None
        try:
            stored = add_sample(SnapshotStore(root, _LIMITS, FullDisk(bytes_left)), _tensors(own), at=3)
        except StoreError as error:
            refused = error
        if stored is None:
            assert refused is not None
            assert refused.code == "snapshot.disk_full"
            assert "remove" in refused.action
            after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
            assert {path for path in after if path.parent.name != "incoming"} == set(before)
            assert before.items() <= after.items()
        else:
            assert stored.evicted == (old[0],)
            assert tensors_of(SnapshotStore(root), stored.id) == _tensors(own)
        assert SnapshotStore(root).verify().damaged == ()


_names = st.frozensets(st.sampled_from("abcdef"), max_size=4)


@st.composite
def _stores(draw: st.DrawFn) -> list[Held]:
    return [
        Held(f"s{i}", draw(st.integers(0, 5)), draw(st.integers(1, 50)), draw(_names), draw(st.booleans()))
        for i in range(draw(st.integers(0, 7)))
    ]


@given(
    held=_stores(),
    sizes=st.fixed_dictionaries({name: st.integers(1, 100) for name in "abcdef"}),
    limits=st.builds(RetentionLimits, st.integers(1, 6), st.integers(1, 600)),
    coming=st.integers(0, 300),
    shared=_names,
)
def test_evictions_take_the_oldest_and_no_more_than_needed(
    held: list[Held], sizes: dict[str, int], limits: RetentionLimits, coming: int, shared: frozenset[str]
) -> None:
    gone = evictions(held, sizes, limits, coming_bytes=coming, coming_chunks=shared)
    by_age = sorted((one for one in held if not one.pinned), key=lambda one: (one.taken_unix_ns, one.identifier))

    def fits(removed: int) -> bool:
        left = [one for one in held if one not in by_age[:removed]]
        unpinned = sum(not one.pinned for one in left)
        return total_bytes(left, sizes, besides=shared) + coming <= limits.bytes_max and (
            unpinned < limits.snapshots_max
        )

    if gone is None:
        assert not any(fits(removed) for removed in range(len(by_age) + 1))
    else:
        assert gone == tuple(one.identifier for one in by_age[: len(gone)])
        assert fits(len(gone))
        assert not any(fits(removed) for removed in range(len(gone)))
