"""Which snapshots make room for a new one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """What a store may hold.

    Attributes:
        snapshots_max: snapshots that nothing refers to; 20 are a week of deploys with before and after.
        bytes_max: of all files. 16 GiB hold one 7B bf16 model and its changes, and a small model many times over.
    """

    snapshots_max: int = 20
    bytes_max: int = 16 << 30


@dataclass(frozen=True, slots=True)
class Held:
    """A stored snapshot: its manifest's size, the chunks it names, whether something refers to it."""

    identifier: str
    taken_unix_ns: int
    manifest_bytes: int
    chunks: frozenset[str]
    pinned: bool


def total_bytes(held: Sequence[Held], sizes: Mapping[str, int], *, besides: Collection[str] = ()) -> int:
    """Bytes of manifests and chunks; a chunk that several snapshots name counts once.

    Args:
        held: the snapshots.
        sizes: chunk name → bytes of its file; one that is missing on disk counts nothing.
        besides: chunks needed in any case.
    """
    named = frozenset().union(*(one.chunks for one in held), besides)
    return sum(one.manifest_bytes for one in held) + sum(sizes.get(name, 0) for name in named)


def evictions(
    held: Sequence[Held],
    sizes: Mapping[str, int],
    limits: RetentionLimits,
    *,
    coming_bytes: int,
    coming_chunks: Collection[str] = (),
) -> tuple[str, ...] | None:
    """Snapshots to remove, oldest first, so that one more fits; None when even all that may go are not enough.

    Args:
        held: what is stored; pinned ones never go.
        sizes: chunk name → bytes of its file.
        limits: of the store.
        coming_bytes: new bytes of the snapshot that is coming.
        coming_chunks: chunks it shares with stored ones: they stay even if those go.
    """
    left = sorted(held, key=lambda one: (one.taken_unix_ns, one.identifier))
    gone: list[str] = []
    while True:
        free = [one for one in left if not one.pinned]
        too_many = len(free) >= limits.snapshots_max
        too_large = total_bytes(left, sizes, besides=coming_chunks) + coming_bytes > limits.bytes_max
        if not too_large and not (too_many and free):
            return tuple(gone)
        if not free:
            return None
        gone.append(free[0].identifier)
        left.remove(free[0])
