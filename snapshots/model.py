"""What a snapshot says: processes region by region, generations tensor by tensor. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RegionKind = Literal["heap", "stack", "anon", "file", "shared", "hugetlb", "device", "special"]

# How a region's content was established.
#   write_tracking: the kernel named every page written since the previous scan; those were read and hashed.
#   page_hash:      every resident page was read and hashed.
#   file_backed:    this process holds no page of its own; the content is the file's.
#   none:           nothing to read (reserved or kernel pages), or no way to (then it is blind).
Method = Literal["write_tracking", "page_hash", "file_backed", "none"]

# How far the evidence reaches.
#   exact:        every write by this process is seen, no other is reported.
#   conservative: may miss writes by others, or report more than was written; ``reason`` says which.
#   blind:        nothing is known of the content.
Confidence = Literal["exact", "conservative", "blind"]

PAGE_BYTES = 4096
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class PageSet:
    """Pages of one region, by page number (address >> 12), with the xxh3_64 digest of each.

    An absent page of private anonymous memory reads as zeros, so pages of zeros are left out of its ``page_hash``
    set; in a private file mapping the set holds the process's own copies, and an absent page is the file's.

    Attributes:
        numbers: ascending page numbers, little-endian u64, packed.
        digests: one u64 each, packed in the same order.
    """

    numbers: bytes = b""
    digests: bytes = b""

    def __post_init__(self) -> None:
        if len(self.numbers) != len(self.digests) or len(self.numbers) % _WORD_BYTES:
            raise ValueError("a page set needs one 8-byte digest per 8-byte page number")

    def __len__(self) -> int:
        return len(self.numbers) // _WORD_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of memory in these pages."""
        return len(self) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Region:
    """One mapping of a process. ``start`` and ``end`` are addresses, ``end`` exclusive.

    Attributes:
        pages: with ``write_tracking``, the pages written since the previous scan; with ``page_hash``, every
            resident page that is not all zeros; else empty.
        reason: why the confidence is not exact, "" otherwise.
    """

    start: int
    end: int
    perms: str
    kind: RegionKind
    name: str
    rss_bytes: int
    anonymous_bytes: int
    method: Method
    confidence: Confidence
    pages: PageSet = PageSet()
    reason: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"region {self.start:#x}-{self.end:#x} is empty or reversed")

    @property
    def size_bytes(self) -> int:
        """Size of the mapping."""
        return self.end - self.start

    @property
    def label(self) -> str:
        """How a human would point at it: ``[heap] 55d0c0000000-55d0c0021000 rw-p``."""
        return f"{self.name or f'[{self.kind}]'} {self.start:x}-{self.end:x} {self.perms}"


@dataclass(frozen=True, slots=True)
class Gap:
    """Something a capture could not cover.

    Attributes:
        subject: what, e.g. ``io_uring:12``; host limits accept blind gaps by this name.
        reason: why, for a human.
        blind: True when content may have changed unseen; False for a mere remark.
    """

    subject: str
    reason: str
    blind: bool


@dataclass(frozen=True, slots=True)
class TrackerScan:
    """Which scan of which tracker a capture made: two captures compare by writes only if their scans adjoin."""

    session: str
    scan: int


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """One process at one time.

    Attributes:
        role: ``front`` or ``engine``.
        start_ticks: start time in clock ticks since boot; with ``pid`` it guards against pid reuse.
        anonymous_bytes: resident anonymous memory plus what of it was swapped out.
        pss_bytes: resident memory with shared pages divided among their users; 0 where it was not measured (tracked
            captures after the first: the kernel takes 17 ms per GiB for it).
        scan: the write-tracking scan, or None when no tracker was used.
    """

    role: str
    pid: int
    start_ticks: int
    rss_bytes: int
    anonymous_bytes: int
    pss_bytes: int
    regions: tuple[Region, ...] = ()
    gaps: tuple[Gap, ...] = ()
    scan: TrackerScan | None = None

    @property
    def written_bytes(self) -> int:
        """Bytes of the pages written since the previous scan, over all tracked regions."""
        return sum(r.pages.size_bytes for r in self.regions if r.method == "write_tracking")


@dataclass(frozen=True, slots=True)
class TensorState:
    """One named parameter or buffer.

    Attributes:
        digest: hex xxh3_128 of its bytes; with ``chunks``, the digest over those
            (:func:`snapshots.tensor_chunks.whole_digest`).
        dtype: as the engine names it, e.g. ``float32``.
        shape: dimensions.
        alias: name of the tensor whose storage it shares (tied weights), "" if it has its own.
        chunks: 16 bytes per chunk of 1 MiB, packed: they tell where in the tensor it changed. Empty when unknown.
        hash: how chunks are hashed: ``xxh3`` from host memory, ``nh`` on the device. Digests of different kinds
            can't be compared: such tensors count as changed.
        derived: a buffer that the engine computes from the build's configuration; no file of the build holds it, so
            no patch can declare it.
    """

    digest: str
    dtype: str
    shape: tuple[int, ...]
    alias: str = ""
    chunks: bytes = b""
    hash: Literal["xxh3", "nh"] = "xxh3"
    derived: bool = False


@dataclass(frozen=True, slots=True)
class GenerationState:
    """The tensors of one resident generation."""

    generation: int
    build_digest: str
    tensors: Mapping[str, TensorState]


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """An engine host at one time.

    Attributes:
        taken_unix_ns: when.
        generation: number of the generation that serves.
        generations: every resident generation: the serving one, and a staged or retained one beside it.
        processes: by role.
        counters: e.g. ``requests_completed``, ``tokens``.
    """

    taken_unix_ns: int
    generation: int
    generations: tuple[GenerationState, ...]
    processes: Mapping[str, ProcessSnapshot]
    counters: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = [state.generation for state in self.generations]
        if len(set(numbers)) != len(numbers):
            raise ValueError("a generation is listed twice")
        if self.generation not in numbers:
            raise ValueError(f"the serving generation {self.generation} is not listed")
        if any(role != process.role for role, process in self.processes.items()):
            raise ValueError("a process is listed under another role than its own")

    def state_of(self, generation: int) -> GenerationState | None:
        """The state of one resident generation, or None."""
        return next((state for state in self.generations if state.generation == generation), None)

    @property
    def active(self) -> GenerationState:
        """The state of the serving generation."""
        state = self.state_of(self.generation)
        assert state is not None
        return state
