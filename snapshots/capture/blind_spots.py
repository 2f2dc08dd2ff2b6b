"""Who else may write a process's memory unseen: devices into pinned pages, and what is not captured at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from snapshots.model import Gap

# fdinfo of a ring: "UserBufs:\t2", then per buffer "    0: 0x7f21c4a00000/4096" (io_uring/fdinfo.c).
_BUFFER = re.compile(r"\s*\d+: (0x[0-9a-f]+)/(\d+)")
# The kernel leaves the ring's part out while another thread holds its lock: microseconds, so a few tries suffice.
_FDINFO_TRIES = 5


@dataclass(frozen=True, slots=True)
class BlindSpots:
    """What write tracking can't see in one process.

    Attributes:
        gaps: for the snapshot.
        ranges: ``(start, end)`` addresses that a device may write; a capture hashes their regions in full.
    """

    gaps: tuple[Gap, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()

    def touch(self, start: int, end: int) -> bool:
        """Whether a device may write anywhere in ``[start, end)``."""
        return any(low < end and start < high for low, high in self.ranges)


def parse_ring(text: str) -> tuple[tuple[int, int], ...] | None:
    """Address ranges of the registered buffers in a ring's ``fdinfo``; None when it doesn't tell.

    A kernel that counts buffers without naming them gives ``((0, 0),)`` each: registered, address not known.
    """
    lines = iter(text.splitlines())
    for line in lines:
        key, _, value = line.partition(":")
        if key == "UserBufs":
            count = int(value)
            named = [match for _, match in zip(range(count), map(_BUFFER.match, lines), strict=False) if match]
            found = [(int(m[1], 16), int(m[1], 16) + int(m[2])) for m in named]
            return (*found, *[(0, 0)] * (count - len(found)))
    return None


def _ring_buffers(pid: int, fd: str) -> tuple[tuple[int, int], ...] | None:
    for _ in range(_FDINFO_TRIES):
        try:
            with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii", errors="replace") as info:  # noqa: PTH123
                found = parse_ring(info.read())
        except FileNotFoundError:
            return ()  # closed meanwhile
        except OSError:
            return None
        if found is not None:
            return found
    return None


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):  # noqa: PTH208 - names only, no Path per descriptor
        try:
            yield name, os.readlink(f"{folder}/{name}")  # noqa: PTH115 - as above
        except OSError:
            continue  # closed meanwhile


def device_writes(pid: int) -> BlindSpots:
    """Devices that write into pinned private pages leave no mark: name what could do so."""
    gaps: list[Gap] = []
    ranges: list[tuple[int, int]] = []
    try:
        for name, target in _descriptors(pid):
            if target == "anon_inode:[io_uring]":
                buffers = _ring_buffers(pid, name)
                if buffers is None:
                    gaps.append(Gap(f"io_uring:{name}", "the kernel does not tell its registered buffers", blind=True))
                elif buffers:
                    gaps.append(
                        Gap(f"io_uring:{name}", "writes through its registered buffers are not seen", blind=True)
                    )
                    ranges += buffers
            elif target.startswith("/dev/infiniband/"):
                gaps.append(Gap(target, "RDMA writes into registered memory are not seen", blind=True))
    except OSError as error:
        reason = f"can't be listed ({error.strerror}): device writes can't be ruled out"
        gaps.append(Gap("descriptors", reason, blind=True))
    return BlindSpots(tuple(gaps), tuple(ranges))


def children(pid: int) -> tuple[Gap, ...]:
    """A remark for every child process: tracking ends at fork, and its memory is not this process's."""
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - names only
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:  # noqa: PTH123
                found.update(map(int, file.read().split()))
    except OSError:
        pass  # a thread ended meanwhile, or a kernel without the list: a remark, no evidence
    reason = "a child process: it is not tracked, and its memory is not part of this snapshot"
    return tuple(Gap(f"child:{child}", reason, blind=False) for child in sorted(found))
