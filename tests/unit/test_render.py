"""What people read: units, times, nesting, and errors with every part."""

from __future__ import annotations

import json

import pytest

from patchctl.errors import ExitCode, PatchctlError
from patchctl.render.error import print_error
from patchctl.render.output import flat_pairs, human_bytes, print_table, short_digest
from patchctl.render.progress import StepPrinter


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (539658511, "514.7 MiB"),
        (-2048, "-2.0 KiB"),
        (5e12, "4656.6 GiB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_nested_data_is_flat_for_people() -> None:
    data = {
        "target": {"version": "1.0.1"},
        "created_unix": 0,
        "size_bytes": 2048,
        "removed": (),
        "changes": [{"path": "a", "change": "replace"}, {"path": "b", "change": "add"}],
        "limit": None,
    }
    assert dict(flat_pairs(data)) == {
        "target.version": "1.0.1",
        "created": "1970-01-01 00:00:00 UTC",
        "size": "2.0 KiB",
        "removed": "none",
        "changes": "a replace, b add",
        "limit": "-",
    }


def test_digests_stay_recognisable() -> None:
    assert short_digest("sha256:" + "ab" * 32) == "sha256:abababababab"
    assert short_digest("other") == "other"


def test_table_columns_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["A", "LONGER"], [("xyz", 1), ("x", 22)])
    assert capsys.readouterr().out.splitlines() == ["A    LONGER", "xyz  1", "x    22"]


def test_errors_as_text_and_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    error = PatchctlError("a.b", "it failed", "because", ExitCode.HELD, "the old build", "patchctl status")
    print_error(error, as_json=False)
    assert capsys.readouterr().err.splitlines() == [
        "error a.b",
        "  what     it failed",
        "  why      because",
        "  serving  the old build",
        "  next     patchctl status",
    ]
    print_error(error, as_json=True)
    assert json.loads(capsys.readouterr().err)["error"] == error.as_dict()


@pytest.mark.parametrize("code", ["trust.identity_mismatch", "patch.damaged", "demo.unexpected", "unheard.of"])
def test_every_part_of_an_error_is_said(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_error(PatchctlError(code, "it failed", "because"), as_json=True)
    error = json.loads(capsys.readouterr().err)["error"]
    assert all(error[part] for part in ("code", "what", "why", "serving", "next_command"))


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": "step", "step": "swap", "phase": "ok", "took_ms": 1.0, "data": {"note": "exchange 1 µs"}}
    StepPrinter().show(event)
    assert capsys.readouterr().err == ""
    StepPrinter(enabled=True).show(event)
    assert "swap" in (line := capsys.readouterr().err)
    assert "exchange 1 µs" in line
