"""The manifest of a stored snapshot: JSON under its own digest, page digests moved out into chunks."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from blake3 import blake3

from snapshots.model import HostSnapshot, PageSet, ProcessSnapshot
from snapshots.store.errors import damaged_manifest

# 100 000 regions of 400 bytes, 10 000 tensors, and the names of 1 TiB in chunks, together and with room to spare.
MANIFEST_BYTES_MAX = 256 << 20
# A process of 1 TiB hashed page by page: 16 bytes a page.
PAGES_BYTES_MAX = 4 << 30
_NS = 10**9
_MS_IN_NS = 10**6


# Checked when a manifest is read: a name is used as a file name.
ChunkName = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}\\Z")]


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content in chunks: all of ``CHUNK_BYTES`` but the last."""

    size_bytes: int
    chunks: tuple[ChunkName, ...]


class TensorContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bytes of one named tensor.

    Attributes:
        address: where it lay in the engine's memory.
        digest: of the whole, equal to the tensor's state.
    """

    generation: int
    name: str
    address: int
    digest: str
    content: Blob


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stored snapshot.

    Attributes:
        id: sorts by time.
        label: why it was taken, e.g. ``before``.
        transaction: which one refers to it, "" if none.
        snapshot: builds, processes with pid and start time, regions with method and confidence, gaps, tensor
            states. Its page sets are empty: they lie in ``pages``.
        pages: the page sets, see :func:`pack_pages`.
        contents: tensors whose bytes are stored; one that shares another's storage is not repeated.
    """

    id: str
    label: str
    transaction: str
    snapshot: HostSnapshot
    pages: Blob
    contents: tuple[TensorContent, ...]
    schema_version: Literal[1] = 1

    @property
    def chunks(self) -> frozenset[str]:
        """Every chunk it names."""
        return frozenset(self.pages.chunks).union(*(tensor.content.chunks for tensor in self.contents))

    def content(self, generation: int, name: str) -> TensorContent | None:
        """The stored bytes of a tensor, following an alias to the tensor whose storage it shares; None without."""
        state = self.snapshot.state_of(generation)
        tensor = None if state is None else state.tensors.get(name)
        stored = tensor.alias or name if tensor is not None else name
        return next((one for one in self.contents if (one.generation, one.name) == (generation, stored)), None)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """The file: ``blake3`` is of the manifest's bytes as they stand."""

    blake3: str
    manifest: msgspec.Raw


def identifier_of(taken_unix_ns: int, entropy: str) -> str:
    """``20260301T101502.123Z-5f3a``: sorts by time, unique by the last part."""
    seconds, rest = divmod(taken_unix_ns, _NS)
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return f"{moment:%Y%m%dT%H%M%S}.{rest // _MS_IN_NS:03d}Z-{entropy}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The file. Same manifest, same bytes."""
    body = msgspec.json.encode(manifest, order="deterministic")
    return msgspec.json.encode(_Envelope(blake3(body).hexdigest(), msgspec.Raw(body)))


def decode_manifest(identifier: str, raw: bytes) -> Manifest:
    """Parse what :func:`encode_manifest` wrote for ``identifier``, and nothing else.

    Raises:
        StoreError: ``snapshot.manifest_damaged``.
    """
    if len(raw) > MANIFEST_BYTES_MAX:
        raise damaged_manifest(identifier, f"its manifest has more than {MANIFEST_BYTES_MAX} bytes")
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
        if blake3(bytes(envelope.manifest)).hexdigest() != envelope.blake3:
            raise damaged_manifest(identifier, "its manifest does not match its own digest")
        manifest = msgspec.json.decode(envelope.manifest, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise damaged_manifest(identifier, f"its manifest does not parse: {error}") from error
    if manifest.id != identifier:
        raise damaged_manifest(identifier, f"its manifest says that it is {manifest.id}")
    return manifest


_PackedPages = dict[str, list[tuple[bytes, bytes]]]


def pack_pages(snapshot: HostSnapshot) -> tuple[HostSnapshot, bytes]:
    """The snapshot without its page sets, and these as msgpack: role → (numbers, digests) of every region."""
    packed: _PackedPages = {
        role: [(region.pages.numbers, region.pages.digests) for region in process.regions]
        for role, process in snapshot.processes.items()
    }
    return _with_pages(snapshot, dict.fromkeys(snapshot.processes)), msgspec.msgpack.encode(packed)


def unpack_pages(manifest: Manifest, packed: bytes) -> HostSnapshot:
    """The whole snapshot again.

    Raises:
        StoreError: ``snapshot.manifest_damaged``, the two parts do not belong together.
    """
    try:
        pages = msgspec.msgpack.decode(packed, type=_PackedPages)
        sets: dict[str, Any] = {role: [PageSet(*one) for one in entries] for role, entries in pages.items()}
        return _with_pages(manifest.snapshot, sets)
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise damaged_manifest(manifest.id, f"its page digests do not belong to it: {error}") from error


def _with_pages(snapshot: HostSnapshot, sets: dict[str, list[PageSet] | None]) -> HostSnapshot:
    def filled(process: ProcessSnapshot, pages: list[PageSet] | None) -> ProcessSnapshot:
        found = [PageSet()] * len(process.regions) if pages is None else pages
        pairs = zip(process.regions, found, strict=True)
        return replace(process, regions=tuple(replace(region, pages=one) for region, one in pairs))

    processes = {role: filled(process, sets[role]) for role, process in snapshot.processes.items()}
    return replace(snapshot, processes=processes)
