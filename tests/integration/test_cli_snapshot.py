"""``patchctl snapshot`` on any process: kept, shown, compared, verified, removed; restore refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchctl.errors import ExitCode

# Reads commands: a number allocates and fills that many KiB, an empty line ends it.
_CHILD = """
import sys
kept = []
for line in sys.stdin:
    kept.append(b"x" * (int(line) << 10))
    print(len(kept), flush=True)
"""


class Grower:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def grow(self, kib: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{kib}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


@pytest.fixture
def child() -> Iterator[Grower]:
    process = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    grower = Grower(process)
    grower.grow(1)
    yield grower
    process.communicate()


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "patchctl", "snapshot", *arguments, "--home", str(home)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )


def data(home: Path, *arguments: str) -> Any:
    done = run(home, *arguments, "-o", "json")
    assert done.returncode == ExitCode.OK, done.stderr
    return json.loads(done.stdout)


def error(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stderr.strip().splitlines()[-1])["error"]


def test_growth_is_seen_in_both_directions_stored_and_live(tmp_path: Path, child: Grower) -> None:
    pid = str(child.process.pid)
    first = data(tmp_path, "take", pid, "--label", "before")
    child.grow(8192)
    live = data(tmp_path, "diff", first["id"], "--local")
    second = data(tmp_path, "take", pid)
    stored = data(tmp_path, "diff", first["id"], second["id"], "--local")
    back = data(tmp_path, "diff", second["id"], first["id"], "--local")
    for report in (live, stored):
        assert report["regions"][0]["growth_bytes"] >= 8192 << 10
        assert report["regions"][0]["process"] == "process"
        assert report["effect"] == "expected"
    assert stored["after"] == second["id"]
    assert live["after"] == "now"
    assert back["regions"][-1]["growth_bytes"] == -stored["regions"][0]["growth_bytes"]


def test_snapshots_are_listed_shown_verified_and_removed(tmp_path: Path, child: Grower) -> None:
    taken = data(tmp_path, "take", str(child.process.pid), "--label", "why")
    (entry,) = data(tmp_path, "list", "--local")
    assert (entry["id"], entry["label"], entry["pids"]) == (taken["id"], "why", {"process": child.process.pid})
    shown = data(tmp_path, "show", "latest", "--local")
    process = shown["processes"]["process"]
    assert process["pid"] == child.process.pid
    heap = next(region for region in process["regions"] if region["label"].startswith("[heap]"))
    assert (heap["method"], heap["confidence"]) == ("page_hash", "exact")
    assert data(tmp_path, "verify", "--local")["snapshots"] == 1
    chunk = next((tmp_path / "snapshots" / "chunks").iterdir())
    chunk.write_bytes(chunk.read_bytes()[:-1])
    broken = run(tmp_path, "verify", "--local", "-o", "json")
    assert broken.returncode == ExitCode.SIGNATURE
    assert error(broken)["code"] == "snapshot.chunk_damaged"
    assert taken["id"] in error(broken)["next_command"]
    assert run(tmp_path, "remove", taken["id"], "--local").returncode == ExitCode.OK
    assert data(tmp_path, "list", "--local") == []


def test_a_process_that_was_replaced_is_unknown(tmp_path: Path, child: Grower) -> None:
    taken = data(tmp_path, "take", str(child.process.pid))
    child.process.communicate()
    done = run(tmp_path, "diff", taken["id"], "--local", "-o", "json")
    assert done.returncode == ExitCode.NOT_FOUND
    assert error(done)["code"] == "snapshot.failed"
    other = data(tmp_path, "take", str(os.getpid()))
    report = data(tmp_path, "diff", taken["id"], other["id"], "--local")
    assert report["effect"] == "unknown"
    assert "replaced" in report["findings"][0]["what"]


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (["show", "absent", "--local"], "snapshot.unknown", ExitCode.NOT_FOUND),
        (["diff", "absent", "--local"], "snapshot.unknown", ExitCode.NOT_FOUND),
        (["remove", "absent", "--local"], "snapshot.unknown", ExitCode.NOT_FOUND),
        (["take", "4194304"], "snapshot.failed", ExitCode.NOT_FOUND),
        (["restore", "latest", "--tensor", "[heap]", "--local"], "restore.evidence_only", ExitCode.USAGE),
        (["restore", "latest"], "cli.usage", ExitCode.USAGE),
        (["take"], "host.unreachable", ExitCode.UNREACHABLE),
        (["show", "x"], "host.unreachable", ExitCode.UNREACHABLE),
    ],
)
def test_refusals_are_complete(tmp_path: Path, arguments: list[str], code: str, exit_code: ExitCode) -> None:
    done = run(tmp_path, *arguments, "-o", "json")
    assert done.returncode == exit_code, done.stderr
    found = error(done)
    assert found["code"] == code
    assert all(found[part] for part in ("what", "why", "serving", "next_command"))
