"""Snapshots of a live engine host: a spoiled tensor is found, put back bit-exactly, and no request fails."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchctl.agent.testing import HostKit, RunningHost, make_kit, until
from patchctl.errors import ExitCode
from snapshots.store.manifest import TensorContent
from snapshots.store.store import SnapshotStore

_TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> HostKit:
    return make_kit(tmp_path_factory.mktemp("kit"), declaration_partial="pass")


@pytest.fixture
def fresh(kit: HostKit, tmp_path: Path) -> HostKit:
    return kit.fresh(tmp_path / "home")


@pytest.fixture(scope="module")
def host(kit: HostKit) -> Iterator[RunningHost]:
    with kit.host() as running_host:
        yield running_host


def _remote(call: str, pid: int, address: int, data: bytearray) -> None:
    buffer = (ctypes.c_char * len(data)).from_buffer(data)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), len(data))
    there = (ctypes.c_uint64 * 2)(address, len(data))
    if getattr(ctypes.CDLL(None, use_errno=True), call)(pid, local, 1, there, 1, 0) != len(data):
        pytest.skip(f"this user may not write another process's memory: {os.strerror(ctypes.get_errno())}")


def _stored(home: Path, snapshot: str, name: str = _TENSOR) -> TensorContent:
    manifest = SnapshotStore(home / "host" / "snapshots").manifest(snapshot)
    return next(one for one in manifest.contents if one.name == name)


def _spoil(host: RunningHost, tensor: TensorContent) -> None:
    """Overwrite its second half, as code that writes weights in place does."""
    half = tensor.content.size_bytes // 2
    _remote("process_vm_writev", host.pids["engine"], tensor.address + half, bytearray(b"\x3f" * half))


def _read(host: RunningHost, tensor: TensorContent) -> bytes:
    data = bytearray(tensor.content.size_bytes)
    _remote("process_vm_readv", host.pids["engine"], tensor.address, data)
    return bytes(data)


def run(host: RunningHost, *arguments: str, expect: int = 0) -> Any:
    done = host.shell.run("snapshot", *arguments, expect=expect)
    return done.data if expect == 0 else done.error


def test_a_spoiled_tensor_is_found_and_put_back_while_streams_run(kit: HostKit, host: RunningHost) -> None:
    with host.traffic() as clients:
        until(lambda: len(clients.finished) > 2)
        taken = run(host, "take", "--label", "good")
        tensor = _stored(kit.home, taken["id"])
        original = _read(host, tensor)
        _spoil(host, tensor)
        assert _read(host, tensor) != original

        report = run(host, "diff", taken["id"])
        assert report["effect"] == "corruption"
        (finding,) = [one for one in report["findings"] if one["effect"] == "corruption"]
        assert finding["subject"] == f"tensor {_TENSOR} of generation 1"
        assert "in 1 of 1 MiB" in finding["what"]

        restored = run(host, "restore", taken["id"], "--tensor", "model.layers.*")
        assert restored["restored"] == [_TENSOR]
        assert restored["unchanged"] > 5
        assert restored["kv_dropped"] == [1]
        assert _read(host, tensor) == original
        assert run(host, "diff", taken["id"])["effect"] == "expected"
        before = len(clients.finished)
        until(lambda: len(clients.finished) > before + 2)
    assert [response.failure for response in clients.responses if response.failure] == []
    assert host.status()["restarts"] == {"front": 0, "engine": 0}


def test_a_snapshot_of_a_corruption_is_kept_as_evidence_and_not_restored(kit: HostKit, host: RunningHost) -> None:
    good = run(host, "take")
    tensor = _stored(kit.home, good["id"])
    _spoil(host, tensor)
    bad = run(host, "take", "--label", "spoiled")
    spoiled = _read(host, tensor)
    both = run(host, "diff", good["id"], bad["id"])
    assert both["effect"] == "corruption"
    refused = run(host, "restore", bad["id"], "--tensor", _TENSOR, expect=ExitCode.SIGNATURE)
    assert refused["code"] == "restore.not_as_committed"
    assert _read(host, tensor) == spoiled
    assert run(host, "restore", good["id"], "--tensor", _TENSOR)["restored"] == [_TENSOR]


def test_a_second_snapshot_of_the_same_host_stores_no_tensor_again(kit: HostKit, host: RunningHost) -> None:
    chunks = kit.home / "host" / "snapshots" / "chunks"
    first = run(host, "take")
    before = {path.name for path in chunks.iterdir()}
    second = run(host, "take")
    new = {path.name for path in chunks.iterdir()} - before
    store = SnapshotStore(kit.home / "host" / "snapshots")
    assert new <= set(store.manifest(second["id"]).pages.chunks), "only page digests of the processes are new"
    assert second["content_bytes"] == first["content_bytes"] > 100_000
    entries = run(host, "list")
    assert [entry["id"] for entry in entries][-2:] == [first["id"], second["id"]]
    assert run(host, "verify")["snapshots"] == len(entries)
    shown = run(host, "show", "latest")
    assert shown["processes"]["engine"]["pid"] == host.pids["engine"]
    assert all(tensor["restorable"] for tensor in shown["generations"][0]["tensors"].values())
    assert run(host, "remove", first["id"])["removed"] == first["id"]


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (["restore", "latest", "--tensor", "[heap]"], "restore.evidence_only", ExitCode.USAGE),
        (["restore", "latest", "--tensor", "globals"], "restore.evidence_only", ExitCode.USAGE),
        (["restore", "latest", "--tensor", "nothing"], "restore.no_such_tensor", ExitCode.NOT_FOUND),
        (["restore", "latest", "--tensor", "*", "--generation", "9"], "restore.not_resident", ExitCode.NOT_FOUND),
        (["restore", "absent", "--tensor", "*"], "snapshot.unknown", ExitCode.NOT_FOUND),
        (["show", "absent"], "snapshot.unknown", ExitCode.NOT_FOUND),
        (["diff", "absent"], "snapshot.unknown", ExitCode.NOT_FOUND),
    ],
)
def test_refusals_are_complete_and_change_nothing(
    kit: HostKit, host: RunningHost, arguments: list[str], code: str, exit_code: ExitCode
) -> None:
    taken = run(host, "take")
    tensor = _stored(kit.home, taken["id"])
    before = _read(host, tensor)
    refused = run(host, *arguments, expect=exit_code)
    assert refused["code"] == code
    assert all(refused[part] for part in ("what", "why", "serving", "next_command"))
    assert _read(host, tensor) == before
    assert host.serves()


def test_the_way_back_restores_an_old_generation_that_was_spoiled_on_probation(fresh: HostKit) -> None:
    """Second line: the exchange back leads to spoiled weights, so the stored ones are put back; nothing restarts."""
    patch = fresh.patch("1.0.0", "1.0.2", sequence=1)
    with fresh.host() as host, host.traffic() as clients:
        until(lambda: len(clients.finished) > 4)
        found: list[TensorContent] = []

        def spoil_when_it_bakes() -> bool:
            if host.step() != "bake":
                return False
            found.append(_stored(fresh.home, "latest"))
            _spoil(host, found[0])
            return True

        spoiler = threading.Thread(target=lambda: until(spoil_when_it_bakes), name="spoiler")
        spoiler.start()
        done = host.deploy(patch, expect=ExitCode.ROLLED_BACK)
        spoiler.join()
        assert "a rollback would not be exact" in done.data["reasons"][0]
        steps = host.ask(f"/v1/transactions/{done.data['transaction']}")["steps"]
        back = next(step["data"] for step in steps if step["step"] == "rollback" and step["phase"] != "intent")
        assert back["repaired"] == [_TENSOR]
        assert back["replaced"] == {}
        content = SnapshotStore(fresh.home / "host" / "snapshots").read(found[0].content)
        assert _read(host, found[0]) == b"".join(content)
        assert host.status()["active"]["version"] == "1.0.0"
        before = len(clients.finished)
        until(lambda: len(clients.finished) > before + 4)
        labels = [(entry["label"], entry["transaction"]) for entry in run(host, "list")]
        assert labels == [("before", done.data["transaction"]), ("after", done.data["transaction"])]
    assert [response.failure for response in clients.responses if response.failure] == []
