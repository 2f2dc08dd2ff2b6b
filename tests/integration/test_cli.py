"""The command line as a process: exit codes, streams, error form, start-up without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchctl.errors import ExitCode


def patchctl(home: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATCHCTL_HOME": str(home), **extra}
    return subprocess.run(
        [sys.executable, "-P", "-m", "patchctl", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_needs_no_heavy_import(tmp_path: Path) -> None:
    done = patchctl(tmp_path, "--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == ExitCode.OK
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "sigstore", "httpx", "sqlalchemy", "starlette", "regorus", "rich"}
    for command in ("demo", "build", "sign", "deploy", "rollback", "status", "engine"):
        assert command in done.stdout


@pytest.mark.parametrize("command", [["status"], ["history"], ["rollback"]])
def test_host_commands_need_no_torch(tmp_path: Path, command: list[str]) -> None:
    done = patchctl(tmp_path, *command, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == ExitCode.UNREACHABLE
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "sigstore", "sqlalchemy"}


def test_errors_are_explained_on_stderr_and_stdout_stays_clean(tmp_path: Path) -> None:
    done = patchctl(tmp_path, "status")
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "error host.unreachable"
    assert [line.split()[0] for line in lines[1:]] == ["what", "why", "serving", "next"]


def test_errors_are_data_on_request(tmp_path: Path) -> None:
    done = patchctl(tmp_path, "status", "-o", "json")
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "host.unreachable"
    assert error["exit_code"] == done.returncode == ExitCode.UNREACHABLE


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (["inspect", "absent.patch"], "patch.not_found", ExitCode.NOT_FOUND),
        (["build", "absent", "absent", "--out", "x", "--sequence", "1"], "build.invalid", ExitCode.NOT_FOUND),
        (["trust", "show"], "trust.domain_absent", ExitCode.NOT_FOUND),
        (["sign", "absent.patch", "--identity", "a@b.c"], "trust.domain_absent", ExitCode.NOT_FOUND),
        (["policy", "check", "--input", "absent.json"], "input.missing", ExitCode.NOT_FOUND),
        (["engine", "serve", "--listen", "nonsense"], "cli.usage", ExitCode.USAGE),
        (["engine", "serve", "--environment", "moon"], "cli.usage", ExitCode.USAGE),
        (["engine", "serve", "--policy-data", "absent.json"], "input.missing", ExitCode.NOT_FOUND),
        (["engine", "serve", "--listen", "127.0.0.1:0"], "host.no_build", ExitCode.USAGE),
        (["engine", "serve", "--listen", "127.0.0.1:0", "--build", "absent"], "build.missing", ExitCode.NOT_FOUND),
        (["snapshot", "take", "4194304"], "snapshot.failed", ExitCode.NOT_FOUND),
        (["demo", "--model", "absent"], "demo.model_refused", ExitCode.NOT_FOUND),
    ],
)
def test_every_refusal_has_its_code(tmp_path: Path, arguments: list[str], code: str, exit_code: ExitCode) -> None:
    done = patchctl(tmp_path, *arguments, "-o", "json")
    assert done.returncode == exit_code, done.stderr
    error = json.loads(done.stderr.strip().splitlines()[-1])["error"]
    assert error["code"] == code
    assert error["what"]
    assert error["why"]


def test_usage_errors_are_2(tmp_path: Path) -> None:
    assert patchctl(tmp_path, "deploy").returncode == ExitCode.USAGE
    assert patchctl(tmp_path, "no-such-command").returncode == ExitCode.USAGE


def test_an_unforeseen_failure_is_explained_too(tmp_path: Path) -> None:
    broken = tmp_path / "home"
    broken.write_text("a file where the home should be")
    done = patchctl(broken, "trust", "init")
    assert done.returncode not in (ExitCode.OK, ExitCode.USAGE)
    assert done.stderr.startswith("error ")
    assert "Traceback" not in done.stderr


def test_a_light_install_says_which_extra_is_missing(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    # An import of numpy finds this first, and it says what a missing module says.
    (hidden / "numpy.py").write_text("raise ModuleNotFoundError('absent', name='numpy')")
    done = patchctl(tmp_path, "snapshot", "take", "1", "-o", "json", PYTHONPATH=str(hidden))
    assert done.returncode == ExitCode.NOT_FOUND
    error = json.loads(done.stderr)["error"]
    assert (error["code"], error["next_command"]) == ("cli.extra_missing", "pip install 'patchctl[engine]'")


def test_trust_is_created_once_and_shown(tmp_path: Path) -> None:
    made = json.loads(patchctl(tmp_path, "trust", "init", "-o", "json").stdout)
    assert made == json.loads(patchctl(tmp_path, "trust", "show", "-o", "json").stdout)
    again = patchctl(tmp_path, "trust", "init", "-o", "json")
    assert json.loads(again.stderr)["error"]["code"] == "trust.domain_exists"
    root = json.loads(patchctl(tmp_path, "trust", "export").stdout)
    assert root["mediaType"].startswith("application/vnd.dev.sigstore.trustedroot")


@pytest.mark.parametrize(("facts", "exit_code"), [("{}", ExitCode.POLICY_DENIED), ("[", ExitCode.POLICY_DENIED)])
def test_policy_check_refuses_what_is_not_facts(tmp_path: Path, facts: str, exit_code: ExitCode) -> None:
    path = tmp_path / "facts.json"
    path.write_text(facts)
    assert patchctl(tmp_path, "policy", "check", "--input", str(path)).returncode == exit_code


def test_snapshot_reads_another_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        done = patchctl(tmp_path, "snapshot", "take", str(child.pid), "-o", "json")
        child.communicate(b"\n")
    assert done.returncode == ExitCode.OK, done.stderr
    data = json.loads(done.stdout)
    process = data["processes"]["process"]
    assert process["pid"] == child.pid
    assert any(region["label"].startswith("[heap]") for region in process["regions"])
