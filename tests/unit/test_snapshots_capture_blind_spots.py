"""What a ring's fdinfo tells about buffers that a device may write."""

from __future__ import annotations

import os

import pytest

from snapshots.capture import blind_spots
from snapshots.capture.blind_spots import BlindSpots, children, device_writes, parse_ring

_HEAD = "pos:\t0\nflags:\t02\nSqMask:\t0x3\nUserFiles:\t1\n    0: 0x55\n"


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        (_HEAD + "UserBufs:\t0\nPollList:\n", ()),
        (
            _HEAD + "UserBufs:\t2\n    0: 0x1000/4096\n    1: 0x7f00/16\nPollList:\n",
            ((0x1000, 0x2000), (0x7F00, 0x7F10)),
        ),
        (_HEAD + "UserBufs:\t2\n    0: <none>\n    1: 0x7f00/16\n", ((0x7F00, 0x7F10), (0, 0))),
        (_HEAD + "UserBufs:\t3\n", ((0, 0),) * 3),
        (_HEAD, None),
        ("", None),
    ],
    ids=["none", "two", "a free slot", "counted only", "lock held", "empty"],
)
def test_registered_buffers(text: str, ranges: tuple[tuple[int, int], ...] | None) -> None:
    assert parse_ring(text) == ranges


def test_ranges_touch_by_bytes() -> None:
    spots = BlindSpots(ranges=((100, 200), (0, 0)))
    assert [spots.touch(*span) for span in ((0, 100), (0, 101), (199, 300), (200, 300), (150, 160))] == [
        False,
        True,
        True,
        False,
        True,
    ]


def test_ring_that_does_not_tell_is_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blind_spots, "_descriptors", lambda _pid: iter([("9", "anon_inode:[io_uring]")]))
    monkeypatch.setattr(blind_spots, "_ring_buffers", lambda _pid, _fd: None)
    (gap,) = device_writes(1).gaps
    assert (gap.subject, gap.blind) == ("io_uring:9", True)
    assert "does not tell" in gap.reason


def test_descriptors_that_cannot_be_listed_are_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: str) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    (gap,) = device_writes(1).gaps
    assert gap.blind
    assert "Permission denied" in gap.reason


def test_rdma_is_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blind_spots, "_descriptors", lambda _pid: iter([("9", "/dev/infiniband/uverbs0")]))
    (gap,) = device_writes(1).gaps
    assert (gap.subject, gap.blind) == ("/dev/infiniband/uverbs0", True)


def test_a_process_that_is_gone_has_no_children() -> None:
    assert children(2**22 + 1) == ()
