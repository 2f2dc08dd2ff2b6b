from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from patchctl.errors import ExitCode, PatchctlError
from patchctl.trust.freshness import (
    CLOCK_SKEW_S_MAX,
    Accepted,
    Freshness,
    FreshnessStore,
    State,
    check,
)
from patchctl.trust.testing import example_hotfix

_NOW = 1_800_000_000
_STATE = State((Accepted("production", "engine-a", 5, _NOW - 10),))


@pytest.mark.parametrize(
    ("changes", "target", "expected"),
    [
        ({}, "engine-a", Freshness.FRESH),
        ({"sequence": 5}, "engine-a", Freshness.REPLAYED),
        ({"sequence": 4}, "engine-a", Freshness.REPLAYED),
        ({"sequence": 5}, "engine-b", Freshness.FRESH),
        ({"sequence": 5, "channel": "canary"}, "engine-a", Freshness.FRESH),
        ({"expires_unix": _NOW + 1}, "engine-a", Freshness.FRESH),
        ({"expires_unix": _NOW}, "engine-a", Freshness.EXPIRED),
        ({"created_unix": _NOW + CLOCK_SKEW_S_MAX}, "engine-a", Freshness.FRESH),
        ({"created_unix": _NOW + CLOCK_SKEW_S_MAX + 1}, "engine-a", Freshness.NOT_YET_VALID),
        ({"sequence": 5, "expires_unix": _NOW}, "engine-a", Freshness.REPLAYED),
    ],
)
def test_the_decision(changes: dict[str, object], target: str, expected: Freshness) -> None:
    defaults = {"sequence": 6, "created_unix": _NOW - 60, "expires_unix": _NOW + 3600}
    assert check(_STATE, example_hotfix(**{**defaults, **changes}), target, _NOW) is expected


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(1, 9)), max_size=30))
def test_accepted_sequences_only_rise(attempts: list[tuple[str, str, int]]) -> None:
    state = State()
    highest: dict[tuple[str, str], int] = {}
    for channel, target, sequence in attempts:
        patch = example_hotfix(channel=channel, sequence=sequence, created_unix=_NOW, expires_unix=_NOW + 1)
        fresh = check(state, patch, target, _NOW) is Freshness.FRESH
        assert fresh == (sequence > highest.get((channel, target), 0))
        if fresh:
            highest[channel, target] = sequence
            state = state.with_accepted(Accepted(channel, target, sequence, _NOW))
    assert {(entry.channel, entry.target): entry.sequence for entry in state.accepted} == highest


def _store(tmp_path: Path) -> FreshnessStore:
    return FreshnessStore(tmp_path / "freshness.json")


def _accept(store: FreshnessStore, sequence: int, target: str = "engine-a", **changes: object) -> None:
    patch = example_hotfix(sequence=sequence, created_unix=_NOW, expires_unix=_NOW + 60, **changes)
    store.accept(patch, target, _NOW)


def _refusal(store: FreshnessStore, sequence: int, target: str = "engine-a") -> PatchctlError:
    with pytest.raises(PatchctlError) as caught:
        _accept(store, sequence, target)
    assert caught.value.exit_code is ExitCode.SIGNATURE
    return caught.value


def test_what_was_accepted_is_remembered_by_the_next_process(tmp_path: Path) -> None:
    _accept(_store(tmp_path), 3)
    assert _store(tmp_path).read().highest("production", "engine-a") == 3
    for replay in (3, 2):
        error = _refusal(_store(tmp_path), replay)
        assert error.code == "trust.replayed"
        assert "3" in error.why
        assert error.next_command
    _accept(_store(tmp_path), 4)
    _accept(_store(tmp_path), 1, "engine-b")


def test_a_refused_patch_changes_nothing(tmp_path: Path) -> None:
    store = _store(tmp_path)
    _accept(store, 3)
    before = store.path.read_bytes()
    for changes, code in (
        ({"expires_unix": _NOW}, "trust.expired"),
        ({"created_unix": _NOW + 120, "expires_unix": _NOW + 130}, "trust.not_yet_valid"),
    ):
        fields = {"sequence": 9, "created_unix": _NOW - 60, "expires_unix": _NOW + 60, **changes}
        with pytest.raises(PatchctlError) as caught:
            store.accept(example_hotfix(**fields), "engine-a", _NOW)
        assert caught.value.code == code
        assert store.path.read_bytes() == before


def test_the_first_read_of_a_new_host_is_empty(tmp_path: Path) -> None:
    assert _store(tmp_path).read() == State()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: b"",
        lambda raw: raw[:-1],
        lambda raw: raw + b" ",
        lambda raw: raw.replace(b'"sequence":3', b'"sequence":"3"'),
        lambda raw: raw.replace(b'"sequence":3', b'"sequence":3,"sequence":3'),
        lambda raw: raw.replace(b'"schema_version":1', b'"schema_version":2'),
        lambda raw: raw.replace(b"[{", b'[{"extra":1,'),
        lambda raw: b"x" * ((1 << 20) + 1),
        lambda raw: rfc8785.dumps({**json.loads(raw), "accepted": json.loads(raw)["accepted"] * 2}),
    ],
)
def test_a_damaged_file_refuses_everything(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    store = _store(tmp_path)
    _accept(store, 3)
    raw = store.path.read_bytes()
    store.path.write_bytes(spoil(raw))
    error = _refusal(store, 4)
    assert error.code == "trust.freshness_damaged"
    assert str(store.path) in error.next_command


def test_a_folder_that_is_gone_refuses(tmp_path: Path) -> None:
    assert _refusal(FreshnessStore(tmp_path / "gone" / "state.json"), 1).code == "trust.freshness_unwritten"


def test_a_bad_target_name_is_not_written(tmp_path: Path) -> None:
    store = _store(tmp_path)
    assert _refusal(store, 1, "../engine").code == "trust.freshness_unwritten"
    assert store.read() == State()


def test_of_two_that_race_for_a_sequence_one_wins(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def race() -> None:
        try:
            _accept(_store(tmp_path), 7)
            outcomes.append("accepted")
        except PatchctlError as error:
            outcomes.append(error.code)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["accepted"] + ["trust.replayed"] * 7
