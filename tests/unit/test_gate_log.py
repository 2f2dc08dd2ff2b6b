from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from patchctl.admission.decision import Decision, Finding
from patchctl.admission.log import START, append, verify
from patchctl.errors import PatchctlError

DECISION = Decision(outcome="deny", denied=(Finding("clock", "zurück é"),), engine="embedded", took_ms=2.5)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "decisions.jsonl"
    for unix in range(4):
        append(path, DECISION, unix=unix)
    return path


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def assert_broken(path: Path) -> None:
    with pytest.raises(PatchctlError) as caught:
        verify(path)
    assert caught.value.code == "log.broken"


def test_chain_grows_and_verifies(log: Path) -> None:
    before = verify(log)
    digest = append(log, DECISION, unix=9)
    after = verify(log)
    assert (before.count, after.count, after.digest) == (4, 5, digest)
    assert log.stat().st_mode & 0o777 == 0o600


def test_empty_log(tmp_path: Path) -> None:
    state = verify(tmp_path / "none.jsonl")
    assert (state.count, state.digest) == (0, START)


def test_finds_every_edited_byte(log: Path) -> None:
    whole = log.read_bytes()
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        log.write_bytes(bytes(damaged))
        assert_broken(log)


@pytest.mark.parametrize("index", range(4))
def test_finds_a_removed_record(log: Path, index: int) -> None:
    kept = lines(log)
    del kept[index]
    log.write_bytes(b"".join(kept))
    assert_broken(log)


def test_finds_reordered_repeated_and_lost_records(log: Path) -> None:
    kept = lines(log)
    for changed in ([kept[1], kept[0], *kept[2:]], [*kept, kept[3]], [], [*kept[:3], kept[3][:-10]]):
        log.write_bytes(b"".join(changed))
        assert_broken(log)
    log.unlink()
    assert_broken(log)


def test_finds_a_rewritten_chain(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    for unix in range(4):
        append(other, Decision(outcome="allow"), unix=unix)
    log.write_bytes(other.read_bytes())
    assert_broken(log)


def test_nothing_is_appended_to_a_broken_log(log: Path) -> None:
    log.write_bytes(b"".join(lines(log)[:-1]))
    before = log.read_bytes()
    with pytest.raises(PatchctlError):
        append(log, DECISION, unix=5)
    assert log.read_bytes() == before


def test_a_line_cut_short_by_a_crash_is_dropped(log: Path) -> None:
    whole = log.read_bytes()
    with log.open("ab") as stream:
        stream.write(b'{"decision":')
    assert verify(log).torn_bytes == 12
    append(log, DECISION, unix=5)
    assert log.read_bytes().startswith(whole)
    assert verify(log).count == 5


def test_a_crash_before_the_head_moved_is_survived(log: Path) -> None:
    head = log.with_name(log.name + ".head")
    old = head.read_bytes()
    append(log, DECISION, unix=5)
    head.write_bytes(old)
    assert verify(log).count == 5
    append(log, DECISION, unix=6)
    assert verify(log).count == 6


def test_damaged_head_is_reported(log: Path) -> None:
    log.with_name(log.name + ".head").write_bytes(b"{}")
    assert_broken(log)


def _append_many(path: Path) -> None:
    for unix in range(10):
        append(path, DECISION, unix=unix)


def test_writers_do_not_interleave(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    assert verify(path).count == 30
