"""The snapshot store. A snapshot is in it whole or not at all, whatever happens while it is written.

Order of a write: chunks aside, durable, named, names durable; then the manifest likewise. Order of a removal: the
manifest, durably; then the chunks that no other manifest names. A crash in between leaves chunks that nothing names,
which the next writer removes; it never leaves a manifest without its chunks. While any manifest is damaged no chunk
is removed at all: it could be one that the damaged manifest names.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshots.model import HostSnapshot
from snapshots.store.chunks import ChunkFiles
from snapshots.store.disk import Disk, explained, locked
from snapshots.store.errors import StoreError, unknown_snapshot
from snapshots.store.manifest import (
    MANIFEST_BYTES_MAX,
    PAGES_BYTES_MAX,
    Blob,
    Manifest,
    TensorContent,
    decode_manifest,
    encode_manifest,
    identifier_of,
    pack_pages,
    unpack_pages,
)
from snapshots.store.retention import Held, RetentionLimits, evictions, total_bytes
from snapshots.store.writer import ContentWriter, TensorSource, pieces_of

_SUFFIX = ".json"
LATEST = "latest"
_DEFAULT_LIMITS = RetentionLimits()


@dataclass(frozen=True, slots=True)
class Stored:
    """What storing a snapshot did.

    Attributes:
        id: the snapshot's name.
        content_bytes: of all tensors and page digests in it.
        chunks: different chunks it names.
        chunks_new: of these, not stored before.
        new_bytes: bytes of their files.
        manifest_bytes: of its manifest, which is always new.
        evicted: snapshots removed to make room.
    """

    id: str
    content_bytes: int
    chunks: int
    chunks_new: int
    new_bytes: int
    manifest_bytes: int
    evicted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Damage:
    """One snapshot that is not whole."""

    snapshot: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What re-hashing everything found."""

    snapshots: int
    chunks: int
    size_bytes: int
    damaged: tuple[Damage, ...]


@dataclass(slots=True)
class _Contents:
    """What the folder holds, as one writer under the lock sees it."""

    manifests: dict[str, Manifest]
    manifest_bytes: dict[str, int]
    damaged: dict[str, StoreError]
    sizes: dict[str, int]

    def held(self, pinned: Collection[str]) -> list[Held]:
        return [
            Held(
                identifier,
                manifest.snapshot.taken_unix_ns,
                self.manifest_bytes[identifier],
                manifest.chunks,
                pinned=bool(manifest.transaction) and manifest.transaction in pinned,
            )
            for identifier, manifest in self.manifests.items()
        ]

    def named(self) -> frozenset[str]:
        return frozenset().union(*(manifest.chunks for manifest in self.manifests.values()))

    def stored_blobs(self) -> dict[tuple[str, int], Blob]:
        """(digest, size) → the chunks of a tensor that is stored in full."""
        return {
            (tensor.digest, tensor.content.size_bytes): tensor.content
            for manifest in self.manifests.values()
            for tensor in manifest.contents
            if all(name in self.sizes for name in tensor.content.chunks)
        }


class SnapshotStore:
    """Snapshots in one folder. Several processes may use it at a time.

    Every method raises :class:`StoreError`; none of its failures harms what is stored.

    Args:
        root: created if missing, private to this user.
        limits: quota and retention.
        disk: the file operations.
    """

    def __init__(self, root: Path, limits: RetentionLimits = _DEFAULT_LIMITS, disk: Disk | None = None) -> None:
        self._root = root
        self._limits = limits
        self._disk = Disk() if disk is None else disk
        self._chunks = ChunkFiles(root, self._disk)
        self._manifests = root / "manifests"
        self._incoming = root / "incoming"
        with explained(root):
            for folder in (root, self._manifests, self._incoming, root / "chunks"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # Writing.

    def add(
        self,
        snapshot: HostSnapshot,
        sources: Iterable[TensorSource] = (),
        *,
        label: str = "",
        transaction: str = "",
        pinned: Collection[str] = (),
    ) -> Stored:
        """Store a snapshot and the bytes of its tensors.

        Args:
            snapshot: what was captured.
            sources: tensors whose bytes are to be kept, e.g. for a restore.
            label: why it was taken.
            transaction: that refers to it, if any.
            pinned: transactions whose snapshots must stay; this one's stay meanwhile in any case.

        Raises:
            StoreError: ``snapshot.quota``, ``snapshot.disk_full``, ``snapshot.tensor_changed``,
                ``snapshot.io_failed``.
        """
        with self._locked(exclusive=True):
            contents = self._recover()
            writer = ContentWriter(
                self._chunks,
                contents.sizes,
                lambda coming: self._require_room(contents, coming, pinned, writer.named),
            )
            try:
                self._require_room(contents, 0, pinned, ())
                manifest, manifest_bytes = self._write(snapshot, sources, label, transaction, contents, writer)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._chunks.remove(writer.new)
                raise
            evicted = self._evictions(contents, manifest_bytes, pinned, manifest.chunks) or ()
            with contextlib.suppress(OSError):  # it is stored; the next writer goes on with what is over the limits
                self._evict(contents, evicted, manifest.chunks)
            return Stored(
                id=manifest.id,
                content_bytes=manifest.pages.size_bytes + sum(one.content.size_bytes for one in manifest.contents),
                chunks=len(manifest.chunks),
                chunks_new=len(writer.new),
                new_bytes=sum(writer.new.values()),
                manifest_bytes=manifest_bytes,
                evicted=evicted,
            )

    def _write(
        self,
        snapshot: HostSnapshot,
        sources: Iterable[TensorSource],
        label: str,
        transaction: str,
        contents: _Contents,
        writer: ContentWriter,
    ) -> tuple[Manifest, int]:
        stripped, packed = pack_pages(snapshot)
        known = contents.stored_blobs()
        tensors: list[TensorContent] = []
        for source in sources:
            key = (source.digest, source.size_bytes)
            known[key] = writer.reuse(known[key]) if key in known else writer.tensor(source)
            tensors.append(TensorContent(source.generation, source.name, source.address, source.digest, known[key]))
        pages = writer.blob(pieces_of(packed))
        writer.flush()
        if writer.new:
            self._chunks.sync()
        identifier = identifier_of(snapshot.taken_unix_ns, secrets.token_hex(2))
        manifest = Manifest(identifier, label, transaction, stripped, pages, tuple(tensors))
        name = f"{identifier}{_SUFFIX}"
        encoded = encode_manifest(manifest)
        self._disk.write(self._incoming / name, (encoded,))
        self._disk.rename(self._incoming / name, self._manifests / name)
        self._disk.sync_folder(self._manifests)
        return manifest, len(encoded)

    def remove(self, identifier: str) -> None:
        """Delete one snapshot, damaged or not, and the chunks that only it named.

        Raises:
            StoreError: ``snapshot.unknown``, ``snapshot.io_failed``.
        """
        with self._locked(exclusive=True):
            resolved = self._resolve(identifier)
            contents = self._recover()
            contents.damaged.pop(resolved, None)
            contents.manifests.pop(resolved, None)
            self._disk.unlink(self._manifests / f"{resolved}{_SUFFIX}")
            self._disk.sync_folder(self._manifests)
            self._sweep(contents, ())

    def _recover(self) -> _Contents:
        """Remove what a crash left behind; read what is stored."""
        for leftover in self._incoming.iterdir():
            self._disk.unlink(leftover)
        manifests, manifest_bytes, damaged = {}, {}, {}
        for identifier in self._identifiers():
            try:
                manifests[identifier] = self._read_manifest(identifier)
                manifest_bytes[identifier] = self._path(identifier).stat().st_size
            except StoreError as error:
                damaged[identifier] = error
        contents = _Contents(manifests, manifest_bytes, damaged, self._chunks.sizes())
        self._sweep(contents, ())
        return contents

    def _sweep(self, contents: _Contents, needed: Collection[str]) -> None:
        """Delete chunks that nothing names and nobody is about to name."""
        if contents.damaged:
            return
        kept = contents.named().union(needed)
        unnamed = [name for name in contents.sizes if name not in kept]
        self._chunks.remove(unnamed)
        for name in unnamed:
            del contents.sizes[name]

    def _require_room(
        self, contents: _Contents, coming_bytes: int, pinned: Collection[str], needed: Collection[str]
    ) -> None:
        """Refuse what would not fit even with everything removed that may go.

        Nothing is removed yet: a snapshot that fails must not have cost an older one. Until it is stored, the store
        holds more than its quota by as much as the new snapshot adds.
        """
        gone = self._evictions(contents, coming_bytes, pinned, needed)
        if gone is None or (gone and contents.damaged):
            raise self._quota(contents, contents.held(pinned), coming_bytes, needed)

    def _evictions(
        self, contents: _Contents, coming_bytes: int, pinned: Collection[str], needed: Collection[str]
    ) -> tuple[str, ...] | None:
        held = contents.held(pinned)
        return evictions(held, contents.sizes, self._limits, coming_bytes=coming_bytes, coming_chunks=needed)

    def _evict(self, contents: _Contents, gone: Collection[str], needed: Collection[str]) -> None:
        for identifier in gone:
            self._disk.unlink(self._path(identifier))
            del contents.manifests[identifier]
        if gone:
            self._disk.sync_folder(self._manifests)
            self._sweep(contents, needed)

    def _quota(self, contents: _Contents, held: list[Held], coming_bytes: int, needed: Collection[str]) -> StoreError:
        used = total_bytes(held, contents.sizes, besides=needed)
        pinned = sum(one.pinned for one in held)
        why = (
            f"{used} bytes are used, {coming_bytes} more are needed, {self._limits.bytes_max} are allowed; "
            f"{pinned} of {len(held)} snapshots belong to transactions that may still need them"
        )
        if contents.damaged:
            why += f"; and nothing is cleaned up while snapshot {min(contents.damaged)} is damaged"
        return StoreError(
            "snapshot.quota",
            "the snapshot was not stored; those stored before are intact",
            why,
            "patchctl snapshot list, then patchctl snapshot remove ID",
        )

    # Reading.

    def identifiers(self) -> tuple[str, ...]:
        """All snapshots, oldest first, damaged ones too."""
        with self._locked(exclusive=False):
            return self._identifiers()

    def manifest(self, identifier: str) -> Manifest:
        """The manifest of a snapshot, named in full, by a unique beginning, or as ``latest``.

        Raises:
            StoreError: ``snapshot.unknown``, ``snapshot.manifest_damaged``.
        """
        with self._locked(exclusive=False):
            return self._read_manifest(self._resolve(identifier))

    def snapshot(self, manifest: Manifest) -> HostSnapshot:
        """The snapshot with its page digests.

        Raises:
            StoreError: ``snapshot.chunk_damaged``, ``snapshot.manifest_damaged``.
        """
        if manifest.pages.size_bytes > PAGES_BYTES_MAX:
            raise StoreError("snapshot.too_large", "it is not read", f"over {PAGES_BYTES_MAX} bytes", "remove it")
        return unpack_pages(manifest, b"".join(self.read(manifest.pages)))

    def read(self, content: Blob) -> Iterator[bytes]:
        """Stored bytes, chunk by chunk, each re-hashed.

        Raises:
            StoreError: ``snapshot.chunk_damaged``; nothing of that chunk was yielded.
        """
        with self._locked(exclusive=False):
            for name in content.chunks:
                yield self._chunks.read(name)

    def verify(self) -> Verification:
        """Re-hash every chunk of every snapshot.

        A damaged chunk is removed: its bytes are worth nothing, and while it lies there, the next snapshot of the
        same content would rely on it instead of storing it again.
        """
        with self._locked(exclusive=True):
            contents = self._recover()
            bad: dict[str, str] = {}
            for name in sorted(contents.named()):
                try:
                    self._chunks.read(name)
                except StoreError as error:
                    bad[name] = error.why
            self._chunks.remove(bad)
            damaged = [Damage(identifier, error.why) for identifier, error in contents.damaged.items()]
            for identifier, manifest in contents.manifests.items():
                lost = sorted(bad.keys() & manifest.chunks)
                if lost:
                    damaged.append(Damage(identifier, f"{len(lost)} chunks, first {lost[0][:12]}: {bad[lost[0]]}"))
            return Verification(
                snapshots=len(contents.manifests) + len(contents.damaged),
                chunks=len(contents.named()),
                size_bytes=sum(contents.sizes.values()),
                damaged=tuple(sorted(damaged, key=lambda one: one.snapshot)),
            )

    # What both need.

    @contextlib.contextmanager
    def _locked(self, *, exclusive: bool) -> Iterator[None]:
        with explained(self._root), locked(self._root / "lock", exclusive=exclusive):
            yield

    def _path(self, identifier: str) -> Path:
        return self._manifests / f"{identifier}{_SUFFIX}"

    def _identifiers(self) -> tuple[str, ...]:
        return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in self._manifests.glob(f"*{_SUFFIX}")))

    def _resolve(self, identifier: str) -> str:
        known = self._identifiers()
        if identifier == LATEST and known:
            return known[-1]
        found = [one for one in known if one.startswith(identifier)] if identifier else []
        if identifier in known:
            return identifier
        if len(found) != 1:
            raise unknown_snapshot(identifier, f"{len(found)} of the {len(known)} stored ones begin with that")
        return found[0]

    def _read_manifest(self, identifier: str) -> Manifest:
        return decode_manifest(identifier, self._disk.read(self._path(identifier), MANIFEST_BYTES_MAX))
