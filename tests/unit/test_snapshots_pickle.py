"""Pickles are read as plain data: what names, calls or builds anything is refused before it is built."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import pickle
import pickletools
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.device import pickles
from snapshots.device.allocator import AllocatorSnapshotError
from snapshots.device.allocator_file import load_allocator
from snapshots.device.pickles import PickleRefusedError, load_plain

_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.text(max_size=5), inner, max_size=5)
        | st.tuples(inner)
        | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=30,
)


@given(_plain, st.sampled_from([3, 4, 5]))  # before 3, bytes were pickled by naming a global
def test_plain_data_comes_back(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol)) == value


class _Run:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


_STRAIGHT = b"\x80\x04"
_HOSTILE: dict[str, bytes] = {
    "protocol 0 global": b"cos\nsystem\n(S'true'\ntR.",
    "protocol 0 instance": b"(S'true'\nios\nsystem\n.",
    "object": _STRAIGHT + b"(cos\nsystem\nX\x04\x00\x00\x00trueo.",
    "stack global": _STRAIGHT + b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "extension": _STRAIGHT + b"\x82\x01.",
    "persistent id": _STRAIGHT + b"X\x01\x00\x00\x00aQ.",
    "persistent id as text": b"Pa\n.",
    "build": _STRAIGHT + b"}}b.",
    "new object": _STRAIGHT + b"))\x81.",
    "next buffer": b"\x80\x05\x97.",
    "buffer to bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "dup": _STRAIGHT + b"]2.",
    "huge string": _STRAIGHT + b"\x8d" + struct.pack("<Q", 2**40) + b".",
    "huge bytes": _STRAIGHT + b"B" + struct.pack("<I", 2**32 - 1) + b".",
    "huge frame": _STRAIGHT + b"\x95" + struct.pack("<Q", 2**40) + b"].",
    "huge memo": _STRAIGHT + b"]r" + struct.pack("<I", 2**22) + b".",
    "largest memo": _STRAIGHT + b"]r" + struct.pack("<I", 2**32 - 1) + b".",
    "huge integer": _STRAIGHT + b"\x8a\xff" + b"\x01" * 255 + b".",
    "integer of gigabytes": _STRAIGHT + b"\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "memo that was never put": _STRAIGHT + b"h\x05.",
    "mark that was never set": _STRAIGHT + b"e.",
    "stack underflow": _STRAIGHT + b"a.",
    "unhashable key": _STRAIGHT + b"}]K\x01s.",
    "cut short": _STRAIGHT + b"]",
    "something behind": _STRAIGHT + b"].].",
    "unknown opcode": _STRAIGHT + b"\xff.",
    "future protocol": b"\x80\x63].",
    "empty": b"",
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_pickles_are_refused_within_little_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PickleRefusedError):
            load_plain(_HOSTILE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"segments": [x]}, lambda x: [[[(x, x)]]]], ids=range(3))
def test_reduce_is_never_called_however_deep(tmp_path: Path, protocol: int, wrap: Any) -> None:
    victim = tmp_path / "made"
    raw = pickle.dumps(wrap(_Run(str(victim))), protocol)
    with pytest.raises(PickleRefusedError):
        load_plain(raw)
    assert not victim.exists()
    pickle.loads(raw)  # noqa: S301 - what would have happened
    assert victim.exists()


def test_the_unpickler_knows_no_globals_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second fence holds without the first."""
    monkeypatch.setattr(pickles, "_check", lambda _raw: None)
    for value in (_Run(str(tmp_path / "made")), OrderedDict(a=1), dt.date(2020, 1, 1), len):
        with pytest.raises(PickleRefusedError, match="global"):
            load_plain(pickle.dumps(value))
    with pytest.raises(PickleRefusedError, match="outside object"):
        load_plain(_HOSTILE["persistent id"])
    assert not (tmp_path / "made").exists()


def test_memo_games_reach_only_plain_data() -> None:
    """A string that is fetched from the memo and used as a global's name is still a global."""
    raw = _STRAIGHT + b"\x8c\x02os\x94\x8c\x06system\x940" + b"h\x00h\x01\x93."
    with pytest.raises(PickleRefusedError):
        load_plain(raw)
    itself = load_plain(_STRAIGHT + b"]\x94h\x00a.")
    assert itself[0] is itself


def test_every_opcode_is_either_plain_or_refused() -> None:
    known = {opcode.name for opcode in pickletools.opcodes}
    plain = set(pickles._FIXED) | set(pickles._COUNTED)
    assert plain <= known
    assert not plain & {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD", "PERSID"}
    assert not plain & {"BINPERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "BYTEARRAY8", "DUP"}


def test_size_and_opcodes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "PICKLE_BYTES_MAX", 100)
    with pytest.raises(PickleRefusedError, match="limit is 100"):
        load_plain(pickle.dumps(b"x" * 200))
    monkeypatch.setattr(pickles, "OPCODES_MAX", 20)
    with pytest.raises(PickleRefusedError, match="more than 20 opcodes"):
        load_plain(pickle.dumps([True] * 40))


@given(st.binary(max_size=200))
def test_noise_is_refused_or_plain(raw: bytes) -> None:
    with contextlib.suppress(PickleRefusedError):
        load_plain(raw)


def test_file_that_is_no_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    for content in (pickle.dumps(os.system), pickle.dumps({"segments": 1}), b"no pickle"):
        path.write_bytes(content)
        with pytest.raises(AllocatorSnapshotError):
            load_allocator(path)
