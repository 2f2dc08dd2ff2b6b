"""A whole engine host on a tiny model: every ending of a transaction, every refusal, every crash."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from patchctl.agent.testing import HostKit, RunningHost, alive, make_kit, reseal, until
from patchctl.commands.host import ATTESTATION_SUFFIX
from patchctl.errors import ExitCode, PatchctlError


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> HostKit:
    return make_kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def fresh(kit: HostKit, tmp_path: Path) -> HostKit:
    """The same builds and keys in a home without host state."""
    return kit.fresh(tmp_path / "home")


@pytest.fixture(scope="module")
def host(kit: HostKit) -> Iterator[RunningHost]:
    with kit.host() as running_host:
        yield running_host


def test_commit_then_rollback_by_name(fresh: HostKit) -> None:
    patch = fresh.patch("1.0.0", "1.0.1", sequence=1)
    with fresh.host() as host, host.traffic() as clients:
        until(lambda: len(clients.finished) > 4)
        done = host.deploy(patch)
        assert done.data["state"] == "committed"
        status = host.status()
        assert status["active"]["version"] == "1.0.1"
        assert [g["state"] for g in status["generations"]] == ["committed", "committed"]

        again = host.deploy(patch, expect=ExitCode.INCOMPATIBLE)
        assert again.error is not None
        assert again.error["code"] == "patch.wrong_base"

        back = host.shell.run("rollback")
        assert back.data["state"] == "committed"
        assert host.status()["active"]["version"] == "1.0.0"
        nothing = host.shell.run("rollback", expect=ExitCode.NOT_FOUND)
        assert nothing.error is not None
        assert "2 (1.0.1)" in nothing.error["why"]

        # The sequence is spent: the same patch is a replay, although its base serves again.
        replay = host.deploy(patch, expect=ExitCode.POLICY_DENIED)
        assert replay.error is not None
        assert "patch.sequence" in replay.error["why"]

        states = [(t["kind"], t["state"]) for t in host.shell.run("history").data]
        assert states == [
            ("deploy", "refused"),
            ("rollback", "refused"),
            ("rollback", "committed"),
            ("deploy", "refused"),
            ("deploy", "committed"),
        ]
    assert [response.failure for response in clients.responses if response.failure] == []


def test_an_undeclared_tensor_is_denied_by_the_gate(kit: HostKit, host: RunningHost) -> None:
    patch = kit.patch("1.0.0", "1.0.2", sequence=5, name="undeclared", declare=False)
    denied = host.deploy(patch, expect=ExitCode.POLICY_DENIED)
    assert denied.error is not None
    assert "declaration" in denied.error["why"]
    assert host.status()["active"]["version"] == "1.0.0"


def test_what_the_gate_lets_pass_the_verdict_rolls_back(kit: HostKit, tmp_path: Path) -> None:
    home = tmp_path / "home"
    lax = make_kit(home, declaration_partial="pass")
    patch = lax.patch("1.0.0", "1.0.2", sequence=1, declare=False)
    with lax.host() as host, host.traffic() as clients:
        until(lambda: len(clients.finished) > 4)
        done = host.deploy(patch, expect=ExitCode.ROLLED_BACK)
        assert done.data["state"] == "rolled-back"
        assert "undeclared change" in done.data["reasons"][0]
        assert host.status()["active"]["version"] == "1.0.0"
        before = len(clients.finished)
        until(lambda: len(clients.finished) > before + 4)
    assert [response.failure for response in clients.responses if response.failure] == []


def test_silence_is_not_success(fresh: HostKit) -> None:
    patch = fresh.patch("1.0.0", "1.0.1", sequence=1)
    with fresh.host("--bake-max-s", "3") as host:
        done = host.deploy(patch, expect=ExitCode.ROLLED_BACK)
        assert done.error is not None
        assert done.error["code"] == "bake.too_few_requests"
        assert host.status()["active"]["version"] == "1.0.0"


@pytest.mark.parametrize(
    ("damage", "code", "exit_code"),
    [
        ("flip", "patch.damaged", ExitCode.SIGNATURE),
        ("truncate", "patch.damaged", ExitCode.SIGNATURE),
        ("no signature", "input.missing", ExitCode.NOT_FOUND),
        ("garbage signature", "trust.", ExitCode.SIGNATURE),
        ("other patch's signature", "trust.", ExitCode.SIGNATURE),
        ("missing", "input.missing", ExitCode.NOT_FOUND),
    ],
)
def test_bad_input_is_refused(
    kit: HostKit, host: RunningHost, tmp_path: Path, damage: str, code: str, exit_code: ExitCode
) -> None:
    good = kit.patch("1.0.0", "1.0.1", sequence=1)
    patch = tmp_path / "bad.patch"
    signature = tmp_path / f"bad.patch{ATTESTATION_SUFFIX}"
    shutil.copy(good, patch)
    shutil.copy(str(good) + ATTESTATION_SUFFIX, signature)
    if damage == "flip":
        raw = bytearray(patch.read_bytes())
        raw[len(raw) // 3] ^= 4
        patch.write_bytes(raw)
    elif damage == "truncate":
        os.truncate(patch, patch.stat().st_size - 512)
    elif damage == "no signature":
        signature.unlink()
    elif damage == "garbage signature":
        signature.write_text("{}\n")
    elif damage == "other patch's signature":
        other = kit.patch("1.0.0", "1.0.2", sequence=2, name="other")
        shutil.copy(str(other) + ATTESTATION_SUFFIX, signature)
    else:
        patch.unlink()
    refused = host.deploy(patch, expect=exit_code)
    assert refused.error is not None
    assert refused.error["code"].startswith(code)
    for part in ("what", "why", "serving", "next_command"):
        assert refused.error[part], part
    assert host.serves()
    assert host.status()["transaction"] is None


def test_a_busy_port_and_a_second_agent_are_explained(kit: HostKit, host: RunningHost, fresh: HostKit) -> None:
    with pytest.raises(PatchctlError) as second, kit.host():
        pass
    assert (second.value.code, second.value.exit_code) == ("host.running", ExitCode.FENCED)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PatchctlError) as busy, fresh.host("--listen", f"127.0.0.1:{port}"):
            pass
    assert (busy.value.code, busy.value.exit_code) == ("host.port_busy", ExitCode.USAGE)
    assert host.serves()


def test_nobody_answers(fresh: HostKit) -> None:
    for command in (["status"], ["history"], ["rollback"]):
        refused = fresh.shell.run(*command, expect=ExitCode.UNREACHABLE)
        assert refused.error is not None
        assert refused.error["code"] == "host.unreachable"


@pytest.mark.parametrize("point", ["deploy.stage.done", "deploy.swap.outcome", "deploy.commit.done"])
def test_kill_9_of_the_agent_ends_on_a_whole_build(fresh: HostKit, point: str) -> None:
    patch = fresh.patch("1.0.0", "1.0.1", sequence=1)
    with fresh.host(PATCHCTL_FAULT=point) as host:
        pids = host.status()["processes"]
        with host.traffic():
            host.deploy(patch, expect=ExitCode.UNREACHABLE)
        assert host.process.wait(timeout=30) == -signal.SIGKILL
        until(lambda: not any(alive(pid) for pid in pids.values()))
    committed = point == "deploy.commit.done"
    with fresh.host() as host:
        assert host.status()["active"]["version"] == ("1.0.1" if committed else "1.0.0")
        assert host.status()["transaction"] is None
        (record,) = host.shell.run("history").data
        probation = point == "deploy.swap.outcome"
        assert record["state"] == ("committed" if committed else "rolled-back" if probation else "failed")
        assert host.serves()


def test_the_reclaim_hook_is_set_at_run_time(host: RunningHost) -> None:
    host.shell.run("engine", "reclaim", "--policy", "threshold", "--high", "0.9", "--low", "0.8")
    told = host.shell.run("engine", "reclaim", "--now").data
    assert (told["reclaim_policy"], told["reclaim_high"], told["reclaim_low"]) == ("threshold", 0.9, 0.8)
    assert told["freed_bytes"] >= 0
    again = host.shell.run("engine", "reclaim", "--now", "--policy", "explicit").data
    assert (again["reclaim_policy"], again["reclaim_runs"]) == ("explicit", told["reclaim_runs"] + 1)


def test_people_get_tables(kit: HostKit, host: RunningHost) -> None:
    def lines(*command: str) -> dict[str, str]:
        environment = {**os.environ, "PATCHCTL_HOME": str(kit.home)}
        argv = [sys.executable, "-P", "-m", "patchctl", *command]
        shown = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout
        return {line.split()[0]: line.partition("  ")[2].strip() for line in shown.splitlines() if line}

    assert lines("engine", "reclaim", "--now")["reclaim_policy"] == "explicit"
    assert lines("status")["restarts"] == "front 0, engine 0"


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        ([], "cli.usage", "--now"),
        (["--policy", "threshold", "--high", "0.5", "--low", "0.6"], "api.bad_request", "0.6"),
        (["--now", "--low", "0"], "api.bad_request", "low"),
    ],
)
def test_a_reclaim_that_makes_no_sense_is_refused(host: RunningHost, arguments: list[str], code: str, why: str) -> None:
    refused = host.shell.run("engine", "reclaim", *arguments, expect=ExitCode.USAGE)
    assert refused.error is not None
    assert refused.error["code"] == code
    assert why in refused.error["why"]
    for part in ("what", "serving", "next_command"):
        assert refused.error[part], part


def test_the_host_refuses_a_policy_that_would_mix_tokenizers(kit: HostKit, host: RunningHost, tmp_path: Path) -> None:
    target = tmp_path / "1.0.9"
    shutil.copytree(kit.build("1.0.1"), target)
    settings = target / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("assistant", "model"))
    reseal(target, version="1.0.9")
    patch = kit.patch("1.0.0", str(target), sequence=9, name="tokenizer")
    for policy in ("carry", "recompute"):
        refused = host.deploy(patch, "--policy", policy, expect=ExitCode.INCOMPATIBLE)
        assert refused.error is not None
        assert refused.error["code"] == "swap.policy_refused"
    assert host.newest()["state"] == "refused"


def test_a_full_disk_while_staging_changes_nothing(fresh: HostKit) -> None:
    patch = fresh.patch("1.0.0", "1.0.2", sequence=1)
    store = fresh.home / "host" / "store"
    store.mkdir(parents=True)
    # By name: where mount lies differs between systems.
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(store)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a tmpfs can't be mounted here, so a full disk can't be made")
    try:
        with fresh.host() as host:
            (store / "filler").write_bytes(bytes(12 << 20))
            refused = host.deploy(patch, expect=ExitCode.HELD)
            assert refused.error is not None
            assert refused.error["code"] == "store.disk_short"
            assert host.status()["active"]["version"] == "1.0.0"
            assert host.serves()
            assert len(list((store / "builds").iterdir())) == 1
    finally:
        subprocess.run(["umount", str(store)], check=True)  # noqa: S607 - as above


def test_a_kernel_without_write_tracking_is_no_obstacle(fresh: HostKit, tmp_path: Path) -> None:
    """userfaultfd answers ENOSYS in front and engine: every page is hashed instead, and the verdict stands."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import errno\n"
        "from snapshots.capture import kernel\n"
        "def absent():\n"
        "    raise OSError(errno.ENOSYS, 'Function not implemented')\n"
        "kernel.open_userfaultfd = absent\n"
    )
    patch = fresh.patch("1.0.0", "1.0.1", sequence=1)
    with fresh.host(PYTHONPATH=str(hook)) as host, host.traffic() as clients:
        until(lambda: len(clients.finished) > 4)
        done = host.deploy(patch)
        assert done.data["state"] == "committed"
        (before, _) = host.shell.run("snapshot", "list").data
        shown = host.shell.run("snapshot", "show", before["id"]).data
    methods = {region["method"] for process in shown["processes"].values() for region in process["regions"]}
    assert "page_hash" in methods
    assert "write_tracking" not in methods


def test_sigterm_ends_everything(fresh: HostKit) -> None:
    with fresh.host() as host:
        pids = host.status()["processes"]
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(timeout=30) == 0
        assert not any(alive(pid) for pid in pids.values())
        assert not (fresh.home / "host" / "agent.sock").exists()
