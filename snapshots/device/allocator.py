"""The torch caching allocator's memory, from its own snapshot: segments, blocks, pools, stacks. Pure.

Source: ``torch.cuda.memory.memory_snapshot`` (a list of segments) or the dict that ``_dump_snapshot`` pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Awaiting free: freed by the program, still in use by another stream.
BlockState = Literal["allocated", "awaiting_free", "free"]

_STATES: Mapping[str, BlockState] = {
    "active_allocated": "allocated",
    "active_awaiting_free": "awaiting_free",
    "active_pending_free": "awaiting_free",
    "inactive": "free",
}
# Shared references let a small hostile file look endless, so the work is bounded: a large training job has some 100 000
# blocks of up to 100 frames each.
BLOCKS_MAX = 2_000_000
FRAMES_READ_MAX = 20_000_000
# Frames that are kept, innermost first: enough to tell the callers apart.
FRAMES_MAX = 12
_NATIVE_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".h", ".cuh", ".hpp")
NO_STACK = ("(no stack recorded)",)
NO_PYTHON_STACK = ("(no Python frame)",)

PoolId = tuple[int, int]
Stack = tuple[str, ...]


class AllocatorSnapshotError(ValueError):
    """The data is not an allocator snapshot, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment.

    Attributes:
        size_bytes: as the allocator rounded it.
        requested_bytes: as the program asked for it; of a free block the size.
        stack: Python frames that allocated it, innermost first, as ``file:line:function``.
    """

    address: int
    size_bytes: int
    requested_bytes: int
    state: BlockState
    stack: Stack


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory the allocator took from the driver in one piece.

    Attributes:
        pool: ``(0, 0)`` for the default pool, another for a private one (CUDA graphs).
        kind: ``small`` or ``large``.
        stream: that it serves.
        blocks: in address order.
    """

    device: int
    address: int
    size_bytes: int
    pool: PoolId
    kind: str
    stream: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class AllocatorSnapshot:
    """All segments, by device and address."""

    segments: tuple[Segment, ...]


def parse_allocator(data: Any) -> AllocatorSnapshot:
    """Read a snapshot as torch gives it, or as it was unpickled.

    Raises:
        AllocatorSnapshotError: fields are missing or of another type, blocks overlap or leave their segment, or there
            are more than :data:`BLOCKS_MAX` or :data:`FRAMES_READ_MAX`.
    """
    segments = data.get("segments") if isinstance(data, Mapping) else data
    if not isinstance(segments, list):
        raise AllocatorSnapshotError("expected a list of segments")
    room = _Room()
    parsed: list[Segment] = []
    for number, entry in enumerate(segments):
        blocks = _field(entry, "blocks", list, f"segment {number}")
        room.take_blocks(1 + len(blocks))
        parsed.append(_segment(entry, blocks, f"segment {number}", room))
    return AllocatorSnapshot(tuple(sorted(parsed, key=lambda s: (s.device, s.address))))


class _Room:
    """What a snapshot may still hold."""

    def __init__(self) -> None:
        self._blocks = BLOCKS_MAX
        self._frames = FRAMES_READ_MAX

    def take_blocks(self, count: int) -> None:
        self._blocks -= count
        if self._blocks < 0:
            raise AllocatorSnapshotError(f"more than {BLOCKS_MAX} segments and blocks")

    def take_frames(self, count: int) -> None:
        self._frames -= count
        if self._frames < 0:
            raise AllocatorSnapshotError(f"more than {FRAMES_READ_MAX} frames")


def _segment(entry: Any, blocks: Sequence[Any], where: str, room: _Room) -> Segment:
    address, size = _number(entry, "address", where), _number(entry, "total_size", where)
    read: list[Block] = []
    at = address
    for index, block in enumerate(blocks):
        found = _block(block, f"{where}, block {index}", at, room)
        at = found.address + found.size_bytes
        if found.address < address or at > address + size:
            raise AllocatorSnapshotError(f"{where}, block {index}: lies outside its segment")
        if read and found.address < read[-1].address + read[-1].size_bytes:
            raise AllocatorSnapshotError(f"{where}, block {index}: overlaps the block before it")
        read.append(found)
    pool = entry.get("segment_pool_id", (0, 0))
    if not isinstance(pool, (tuple, list)) or len(pool) != 2 or not all(type(part) is int for part in pool):  # noqa: PLR2004
        raise AllocatorSnapshotError(f"{where}: segment_pool_id is no pair of numbers")
    return Segment(
        device=_number(entry, "device", where),
        address=address,
        size_bytes=size,
        pool=(pool[0], pool[1]),
        kind=_field(entry, "segment_type", str, where),
        stream=_number(entry, "stream", where),
        blocks=tuple(read),
    )


def _block(entry: Any, where: str, address_else: int, room: _Room) -> Block:
    size = _number(entry, "size", where)
    state = _STATES.get(_field(entry, "state", str, where))
    if state is None:
        raise AllocatorSnapshotError(f"{where}: state {entry['state']!r} is not known")
    asked = _number(entry, "requested_size", where) if state != "free" and "requested_size" in entry else size
    # Snapshots of torch before 2.1 leave the address out: blocks then follow each other without a gap.
    address = _number(entry, "address", where) if "address" in entry else address_else
    return Block(address, size, asked, state, _stack(entry.get("frames") or [], where, room))


def _stack(frames: Any, where: str, room: _Room) -> Stack:
    if not isinstance(frames, list):
        raise AllocatorSnapshotError(f"{where}: frames is no list")
    if not frames:
        return NO_STACK
    room.take_frames(len(frames))
    found: list[str] = []
    for frame in frames:
        file = _field(frame, "filename", str, where)
        if file == "??" or file.endswith(_NATIVE_SUFFIXES):
            continue
        line, name = _number(frame, "line", where), _field(frame, "name", str, where)
        found.append(f"{file.rpartition('/')[2]}:{line}:{name}")
        if len(found) == FRAMES_MAX:
            break
    return tuple(found) or NO_PYTHON_STACK


def _field(entry: Any, name: str, kind: type, where: str) -> Any:
    value = entry.get(name) if isinstance(entry, Mapping) else None
    if type(value) is not kind:
        raise AllocatorSnapshotError(f"{where}: {name} is missing or no {kind.__name__}")
    return value


def _number(entry: Any, name: str, where: str) -> int:
    value: int = _field(entry, name, int, where)
    if value < 0:
        raise AllocatorSnapshotError(f"{where}: {name} is negative")
    return value
