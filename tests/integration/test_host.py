"""A whole engine host on a tiny model: every ending of a transaction, every refusal, every crash."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from patchctl.agent.testing import HostKit, RunningHost, make_kit
from patchctl.commands.host import ATTESTATION_SUFFIX
from patchctl.demo.commands import Shell
from patchctl.errors import ExitCode, PatchctlError


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def serves(host: RunningHost) -> bool:
    try:
        return httpx.get(host.ready["url"] + "/health", timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> HostKit:
    return make_kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def fresh(kit: HostKit, tmp_path: Path) -> HostKit:
    """The same builds and keys in a home without host state."""
    home = tmp_path / "home"
    shutil.copytree(kit.home, home, ignore=shutil.ignore_patterns("host"))
    return HostKit(home, Shell(home, None))


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
    assert serves(host)
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
    assert serves(host)


def test_nobody_answers(fresh: HostKit) -> None:
    for command in (["status"], ["history"], ["rollback"]):
        refused = fresh.shell.run(*command, expect=ExitCode.UNREACHABLE)
        assert refused.error is not None
        assert refused.error["code"] == "host.unreachable"


def test_a_killed_process_is_replaced_by_the_committed_build(fresh: HostKit) -> None:
    with fresh.host() as host:
        for role in ("engine", "front"):
            pids = host.status()["processes"]
            os.kill(pids[role], signal.SIGKILL)
            until(lambda: host.status()["processes"] not in (pids, {}))  # noqa: B023 - called within the iteration
            until(lambda: serves(host))
            assert host.status()["active"]["version"] == "1.0.0"


@pytest.mark.parametrize("point", ["deploy.stage.done", "deploy.swap.outcome", "deploy.commit.done"])
def test_kill_9_of_the_agent_ends_on_a_whole_build(fresh: HostKit, point: str) -> None:
    patch = fresh.patch("1.0.0", "1.0.1", sequence=1)
    with fresh.host(PATCHCTL_FAULT=point) as host:
        pids = host.status()["processes"]
        with host.traffic():
            host.deploy(patch, expect=ExitCode.UNREACHABLE)
        assert host.process.wait(timeout=30) == -signal.SIGKILL
        until(lambda: not any(running(pid) for pid in pids.values()))
    committed = point == "deploy.commit.done"
    with fresh.host() as host:
        assert host.status()["active"]["version"] == ("1.0.1" if committed else "1.0.0")
        assert host.status()["transaction"] is None
        (record,) = host.shell.run("history").data
        probation = point == "deploy.swap.outcome"
        assert record["state"] == ("committed" if committed else "rolled-back" if probation else "failed")
        assert serves(host)


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
            assert serves(host)
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
    raw = (fresh.home / "host" / "evidence" / done.data["transaction"] / "before.json").read_text()
    assert '"method":"page_hash"' in raw
    assert '"method":"write_tracking"' not in raw


def test_sigterm_ends_everything(fresh: HostKit) -> None:
    with fresh.host() as host:
        pids = host.status()["processes"]
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(timeout=30) == 0
        assert not any(running(pid) for pid in pids.values())
        assert not (fresh.home / "host" / "agent.sock").exists()
