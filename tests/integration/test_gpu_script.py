"""The GPU checks run from end to end, on a small model and the tape backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_check_runs_and_its_figures_are_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run", "--device", "cpu", str(tmp_path / "results")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    # Figures depend on the machine, and whether they meet a target as well; that checks finish does not.
    assert [section["error"] for section in results["sections"]] == [""] * 7, done.stderr
    rows = {row["name"]: row for section in results["sections"] for row in section["rows"]}
    assert rows["cases that hold"]["value"] == "19 of 19"
    for name in ("steps with another result", "the capture is refused", "the replay before it still gives the same"):
        assert rows[name]["met"]
    for policy in ("auto", "carry", "recompute", "drain"):
        assert rows[f"{policy}: answers equal to no swap"]["met"]
    assert "| cases that hold |" in done.stdout
