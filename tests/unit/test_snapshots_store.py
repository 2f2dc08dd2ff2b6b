"""Storing, sharing, retention, damage: what the snapshot store keeps and what it refuses."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import types
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshots.store import frames
from snapshots.store.errors import StoreError
from snapshots.store.retention import RetentionLimits
from snapshots.store.store import SnapshotStore
from snapshots.store.testing import QuickDisk, add_sample, sample_snapshot, sources_of, tensors_of
from snapshots.store.writer import pieces_of
from snapshots.tensor_chunks import CHUNK_BYTES

_TENSORS = {"a": bytes(range(256)) * 3, "b": b"\x07" * 500}


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", disk=QuickDisk())


def _chunk_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "snapshots" / "chunks").iterdir())


def test_a_stored_snapshot_comes_back_bit_exactly(store: SnapshotStore) -> None:
    snapshot = sample_snapshot(_TENSORS, taken_unix_ns=5, pages=b"12345678abcdefgh")
    stored = store.add(snapshot, sources_of(_TENSORS), label="before", transaction="t1")
    manifest = store.manifest(stored.id)
    assert store.snapshot(manifest) == snapshot
    assert tensors_of(store, stored.id) == _TENSORS
    assert (manifest.label, manifest.transaction) == ("before", "t1")
    assert manifest.snapshot.processes["engine"].regions[0].confidence == "conservative"


def test_a_second_identical_snapshot_stores_no_new_bytes_and_reads_no_tensor(store: SnapshotStore) -> None:
    snapshot = sample_snapshot(_TENSORS, taken_unix_ns=5, pages=b"12345678")
    first = store.add(snapshot, sources_of(_TENSORS))

    def unreadable() -> Iterator[bytes]:
        raise AssertionError("its digest is known: nothing has to be read")

    sources = [replace(source, read=unreadable) for source in sources_of(_TENSORS)]
    second = store.add(replace(snapshot, taken_unix_ns=10**9), sources)
    assert first.new_bytes > 0
    assert (second.new_bytes, second.chunks_new) == (0, 0)
    assert second.chunks == first.chunks
    assert tensors_of(store, second.id) == _TENSORS


def test_a_changed_piece_of_a_tensor_costs_that_chunk_alone(store: SnapshotStore) -> None:
    first = add_sample(store, _TENSORS, at=1)
    changed = {**_TENSORS, "b": b"\x07" * 499 + b"\x08"}
    second = add_sample(store, changed, at=2)
    assert second.chunks_new == 2  # the last piece of b, and the page digests of another time
    assert tensors_of(store, first.id) == _TENSORS
    assert tensors_of(store, second.id) == changed


def test_a_lost_chunk_is_stored_again_by_the_next_snapshot_of_the_same_content(
    store: SnapshotStore, tmp_path: Path
) -> None:
    first = add_sample(store, _TENSORS, at=1)
    for path in _chunk_files(tmp_path):
        path.write_bytes(b"\x00" + b"rotten")
    assert {damage.snapshot for damage in store.verify().damaged} == {first.id}
    add_sample(store, _TENSORS, at=1)
    assert store.verify().damaged == ()
    assert tensors_of(store, first.id) == _TENSORS


def test_every_flipped_bit_of_a_chunk_is_detected(store: SnapshotStore, tmp_path: Path) -> None:
    damaged = add_sample(store, _TENSORS, at=1)
    other = add_sample(store, {"c": b"\x09" * 70}, at=2)
    name = store.manifest(damaged.id).contents[0].content.chunks[0]
    path = tmp_path / "snapshots" / "chunks" / name
    whole = path.read_bytes()
    for at in range(0, len(whole) * 8, 37):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(StoreError) as caught:
            tensors_of(store, damaged.id)
        assert caught.value.code == "snapshot.chunk_damaged"
    found = store.verify()
    assert [damage.snapshot for damage in found.damaged] == [damaged.id]
    assert found.snapshots == 2
    assert tensors_of(store, other.id) == {"c": b"\x09" * 70}


@pytest.mark.parametrize("keep", [0, 1, 50, -1])
def test_a_truncated_manifest_is_detected_and_stops_all_clean_up(
    store: SnapshotStore, tmp_path: Path, keep: int
) -> None:
    broken = add_sample(store, _TENSORS, at=1)
    whole = add_sample(store, {"c": b"\x09" * 70}, at=2)
    path = tmp_path / "snapshots" / "manifests" / f"{broken.id}.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StoreError) as caught:
        store.manifest(broken.id)
    assert caught.value.code == "snapshot.manifest_damaged"
    assert broken.id in caught.value.action
    files = _chunk_files(tmp_path)
    assert [damage.snapshot for damage in store.verify().damaged] == [broken.id]
    store.remove(whole.id)
    assert _chunk_files(tmp_path) == files, "a chunk that the damaged manifest may name was removed"
    store.remove(broken.id)
    assert _chunk_files(tmp_path) == []


def test_a_changed_manifest_is_detected(store: SnapshotStore, tmp_path: Path) -> None:
    stored = add_sample(store, _TENSORS, at=1)
    path = tmp_path / "snapshots" / "manifests" / f"{stored.id}.json"
    path.write_bytes(path.read_bytes().replace(b'"pid":7', b'"pid":8'))
    with pytest.raises(StoreError, match="does not match its own digest"):
        store.manifest(stored.id)
    path.write_bytes(path.read_bytes().replace(b'"pid":8', b'"pid":7'))
    path.rename(path.with_name("other.json"))
    with pytest.raises(StoreError, match="says that it is"):
        store.manifest("other")


def test_a_chunk_name_can_not_lead_out_of_the_store(store: SnapshotStore) -> None:
    from blake3 import blake3

    from snapshots.store.manifest import decode_manifest, encode_manifest

    stored = add_sample(store, _TENSORS, at=1)
    manifest = store.manifest(stored.id)
    raw = encode_manifest(manifest)
    body = raw.split(b'"manifest":', 1)[1][:-1].replace(manifest.pages.chunks[0].encode(), b"../manifests/x")
    forged = b'{"blake3":"%b","manifest":%b}' % (blake3(body).hexdigest().encode(), body)
    with pytest.raises(StoreError, match="does not parse"):
        decode_manifest(stored.id, forged)


def test_the_oldest_go_first_and_pinned_transactions_stay(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "snapshots", RetentionLimits(snapshots_max=2))
    pinned = add_sample(store, {"t": b"p" * 100}, at=1, transaction="t1", pinned=("t1",))
    kept = [add_sample(store, {"t": bytes([i]) * 100}, at=i, pinned=("t1",)) for i in (2, 3, 4)]
    assert kept[2].evicted == (kept[0].id,)
    assert store.identifiers() == (pinned.id, kept[1].id, kept[2].id)
    assert tensors_of(store, pinned.id) == {"t": b"p" * 100}
    later = add_sample(store, {"t": b"z"}, at=5)
    assert later.evicted == (pinned.id, kept[1].id), "no longer referred to, so oldest out first"


def test_a_quota_that_pinned_snapshots_fill_refuses_and_removes_nothing(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "snapshots", RetentionLimits(bytes_max=8500))
    first = add_sample(store, {"t": os.urandom(1000)}, at=1, transaction="t1")
    add_sample(store, {"t": os.urandom(1000)}, at=2)
    before = store.identifiers(), _chunk_files(tmp_path)
    with pytest.raises(StoreError) as caught:
        add_sample(store, {"t": os.urandom(6000)}, at=3, pinned=("t1",))
    assert caught.value.code == "snapshot.quota"
    assert "1 of 2 snapshots belong to transactions" in caught.value.why
    assert (store.identifiers(), _chunk_files(tmp_path)) == before
    last = add_sample(store, {"t": os.urandom(2000)}, at=4, pinned=("t1",))
    assert store.identifiers() == (first.id, last.id)


def test_a_tensor_that_changes_while_it_is_read_is_not_stored(store: SnapshotStore, tmp_path: Path) -> None:
    sources = [replace(source, digest="0" * 32) for source in sources_of(_TENSORS)]
    with pytest.raises(StoreError) as caught:
        store.add(sample_snapshot(_TENSORS, taken_unix_ns=5), sources)
    assert caught.value.code == "snapshot.tensor_changed"
    assert store.identifiers() == ()
    assert _chunk_files(tmp_path) == []


def test_names_resolve_by_prefix_and_latest(store: SnapshotStore) -> None:
    first, second = (add_sample(store, _TENSORS, at=at) for at in (1, 100_000_000))
    assert store.manifest("latest").id == second.id
    assert store.manifest(first.id[:12]).id == first.id
    for ambiguous in ("19", "", "../manifests"):
        with pytest.raises(StoreError) as caught:
            store.manifest(ambiguous)
        assert caught.value.code == "snapshot.unknown"


def test_pieces_are_chunks() -> None:
    data = bytes(CHUNK_BYTES + 5)
    assert [len(piece) for piece in pieces_of(data)] == [CHUNK_BYTES, 5]


# The limit of one file's size is the portable twin of a full disk: the write fails half way, with another errno.
def test_a_file_size_limit_is_explained_as_a_full_disk(store: SnapshotStore, tmp_path: Path) -> None:
    old = add_sample(store, _TENSORS, at=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(StoreError) as caught:
            add_sample(store, {"t": os.urandom(200)}, at=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.code == "snapshot.disk_full"
    assert store.identifiers() == (old.id,)
    assert tensors_of(store, old.id) == _TENSORS


_ON_TMPFS = """
    import ctypes, os, sys
    from pathlib import Path
    from snapshots.store.errors import StoreError
    from snapshots.store.store import SnapshotStore
    from snapshots.store.testing import add_sample, tensors_of
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
        sys.exit(77)
    if libc.mount(b"tmpfs", sys.argv[1].encode(), b"tmpfs", 0, b"size=256k"):
        sys.exit(77)
    store = SnapshotStore(Path(sys.argv[1]))
    old = add_sample(store, {"t": b"a" * 100}, at=1)
    try:
        add_sample(store, {"t": os.urandom(400_000)}, at=2)
    except StoreError as error:
        assert error.code == "snapshot.disk_full", error
    else:
        sys.exit("it was stored")
    assert tensors_of(store, old.id) == {"t": b"a" * 100}
    assert store.verify().damaged == ()
    add_sample(store, {"t": b"b" * 1000}, at=3)
"""


def test_a_full_tmpfs_is_detected_and_cleared(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_ON_TMPFS), str(tmp_path)], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("this user may not mount")
    assert done.returncode == 0, done.stderr


_KILLED = """
    import os, signal, sys
    from pathlib import Path
    from snapshots.store.disk import Disk
    from snapshots.store.store import SnapshotStore
    from snapshots.store.testing import add_sample

    class Killing(Disk):
        def __init__(self, point):
            self.point = point
        def reach(self, point):
            if point == self.point:
                os.kill(os.getpid(), signal.SIGKILL)
        def write(self, path, parts):
            kind = "manifest" if path.suffix else "chunk"
            self.reach(f"{kind} before write")
            super().write(path, parts)
            self.reach(f"{kind} written")
        def rename(self, source, target):
            super().rename(source, target)
            self.reach("manifest named" if target.suffix else "chunk named")
        def sync_folder(self, folder):
            super().sync_folder(folder)
            self.reach(f"{folder.name} synced")

    add_sample(SnapshotStore(Path(sys.argv[1]), disk=Killing(sys.argv[2])), {"t": b"new" * 90, "u": b"v"}, at=2)
"""
_POINTS = {
    "chunk before write": False,
    "chunk written": False,
    "chunk named": False,
    "chunks synced": False,
    "manifest before write": False,
    "manifest written": False,
    "manifest named": True,
    "manifests synced": True,
}


@pytest.mark.parametrize(("point", "stored"), _POINTS.items())
def test_kill_9_at_a_named_point(store: SnapshotStore, tmp_path: Path, point: str, stored: bool) -> None:
    old = add_sample(store, _TENSORS, at=1)
    script = [sys.executable, "-c", textwrap.dedent(_KILLED), str(tmp_path / "snapshots"), point]
    assert subprocess.run(script, check=False).returncode == -signal.SIGKILL
    assert len(store.identifiers()) == 1 + stored
    assert store.verify().damaged == ()
    assert tensors_of(store, old.id) == _TENSORS
    again = add_sample(store, {"t": b"new" * 90, "u": b"v"}, at=2)
    assert again.chunks_new == (0 if stored else again.chunks)


class _FakeZstd(types.SimpleNamespace):
    """The calls of ``zstandard`` on zlib: proves the framing, not zstd."""

    ZstdError = zlib.error

    @staticmethod
    def ZstdCompressor(level: int) -> types.SimpleNamespace:  # noqa: N802 - the package's name
        return types.SimpleNamespace(compress=lambda data: zlib.compress(data, level))

    @staticmethod
    def ZstdDecompressor() -> types.SimpleNamespace:  # noqa: N802 - the package's name
        return types.SimpleNamespace(decompress=lambda body, max_output_size: zlib.decompress(body))

    @staticmethod
    def get_frame_parameters(body: bytes) -> types.SimpleNamespace:
        return types.SimpleNamespace(content_size=len(zlib.decompress(body)))


def test_compression_is_used_where_it_pays_and_never_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_zstd", _FakeZstd())
    compressible, random_bytes = b"x" * 5000, os.urandom(5000)
    small, plain = (b"".join(frames.encode(data)) for data in (compressible, random_bytes))
    assert len(small) < 100
    assert plain == b"\x00" + random_bytes
    assert (frames.decode(small), frames.decode(plain)) == (compressible, random_bytes)
    bomb = b"\x01" + zlib.compress(bytes(CHUNK_BYTES + 1))
    for bad in (bomb, small[:-3], b"\x02abc", b"", b"\x00" + bytes(CHUNK_BYTES + 1)):
        with pytest.raises(frames.FrameInvalidError):
            frames.decode(bad)
    monkeypatch.setattr(frames, "_zstd", None)
    with pytest.raises(frames.FrameInvalidError, match="install the package zstandard"):
        frames.decode(small)


def test_zstd_itself(store: SnapshotStore, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    stored = add_sample(store, {"t": b"x" * 64}, at=1)
    assert tensors_of(store, stored.id) == {"t": b"x" * 64}
    frame = b"".join(frames.encode(b"x" * CHUNK_BYTES))
    assert len(frame) < 1000
    assert frames.decode(frame) == b"x" * CHUNK_BYTES
    for cut in (frame[:20], frame[:-1]):
        with pytest.raises(frames.FrameInvalidError):
            frames.decode(cut)
