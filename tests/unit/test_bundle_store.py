from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from engine.build import verify_build
from patchctl.bundle.testing import sample_builds, write_build
from patchctl.errors import ExitCode, PatchctlError
from patchctl.store import BuildStore


@pytest.fixture
def store(tmp_path: Path) -> BuildStore:
    return BuildStore(tmp_path / "store")


@pytest.mark.parametrize("link", [False, True])
def test_import_makes_files_read_only_and_durable(tmp_path: Path, store: BuildStore, link: bool) -> None:
    base, _ = sample_builds(tmp_path)
    digest = store.import_build(base, link=link)
    assert store.has(digest)
    assert store.list() == (digest,)
    assert store.verify(digest).digest == digest
    assert store.path(digest).name == digest.replace(":", "-")
    stored = store.path(digest) / "tokenizer.json"
    assert stored.stat().st_mode & 0o777 == 0o444
    assert stored.samefile(base / "tokenizer.json") == link
    assert store.import_build(base) == digest


@pytest.mark.parametrize("link", [False, True])
def test_unsound_folders_are_not_imported(tmp_path: Path, store: BuildStore, link: bool) -> None:
    base, _ = sample_builds(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}" * 300)
    secret.chmod(0o600)
    token = base / "tokenizer.json"

    def refused() -> None:
        with pytest.raises(PatchctlError) as caught:
            store.import_build(base, link=link)
        assert caught.value.code == "store.build_damaged"
        assert list(store.builds.iterdir()) == []

    token.write_bytes(b"[]" * 300)
    refused()
    token.unlink()
    token.symlink_to(secret)
    refused()
    assert secret.stat().st_mode & 0o777 == 0o600
    token.unlink()
    os.mkfifo(token)
    refused()
    token.unlink()
    token.write_bytes(b"{}" * 300)
    (base / "extra").write_bytes(b"")
    refused()
    (base / "extra").unlink()
    (base / "old").rename(tmp_path / "old")
    (base / "old").symlink_to(tmp_path / "old")
    refused()
    (base / "old").unlink()
    (tmp_path / "old").rename(base / "old")
    store.import_build(base, link=link)
    with pytest.raises(PatchctlError):
        store.import_build(tmp_path / "nowhere")


def test_a_missing_file_is_refused(tmp_path: Path, store: BuildStore) -> None:
    base, _ = sample_builds(tmp_path)
    (base / "tokenizer.json").unlink()
    with pytest.raises(PatchctlError):
        store.import_build(base)
    assert list(store.builds.iterdir()) == []


def test_damage_is_found(tmp_path: Path, store: BuildStore) -> None:
    base, _ = sample_builds(tmp_path)
    digest = store.import_build(base)
    (store.path(digest) / "surplus").write_bytes(b"")
    with pytest.raises(PatchctlError, match="surplus"):
        store.verify(digest)
    with pytest.raises(PatchctlError, match="surplus"):
        store.import_build(base)


def test_remove_refuses_what_is_protected(tmp_path: Path, store: BuildStore) -> None:
    base, target = sample_builds(tmp_path)
    old, new = store.import_build(base), store.import_build(target)
    with pytest.raises(PatchctlError) as caught:
        store.remove(old, protected={old})
    assert (caught.value.code, caught.value.exit_code) == ("store.protected", ExitCode.HELD)
    store.remove(old, protected={new})
    assert store.list() == (new,)
    assert [path.name for path in store.builds.iterdir()] == [store.path(new).name]
    store.verify(new)
    with pytest.raises(PatchctlError) as caught:
        store.remove(old)
    assert caught.value.exit_code is ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    "digest", ["", "sha256:", "sha256:../../etc", "sha256-" + "0" * 64, "sha256:" + "0" * 64 + "\n"]
)
def test_names_that_are_no_digest_lead_nowhere(store: BuildStore, digest: str) -> None:
    with pytest.raises(PatchctlError) as caught:
        store.path(digest)
    assert caught.value.exit_code is ExitCode.NOT_FOUND


def test_unknown_builds_are_not_found(store: BuildStore) -> None:
    with pytest.raises(PatchctlError) as caught:
        store.verify("sha256:" + "0" * 64)
    assert caught.value.exit_code is ExitCode.NOT_FOUND


def test_opening_removes_leftovers_but_no_live_writers(tmp_path: Path, store: BuildStore) -> None:
    digest = write_build(tmp_path / "b", {"x": b"1"})
    store.import_build(tmp_path / "b")
    dead = store.builds / ".aside-dead"
    (dead / "sub").mkdir(parents=True)
    (dead / "sub" / "f").write_bytes(b"x")
    with store.aside() as live:
        (live / "f").write_bytes(b"x")
        BuildStore(store.root)
        assert not dead.exists()
        assert (live / "f").exists()
    assert [path.name for path in store.builds.iterdir()] == [store.path(digest).name]


def test_a_folder_is_locked_before_others_may_look(store: BuildStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between creating a folder and locking it, the store's lock is held, so no sweep can run."""
    real, checked = fcntl.flock, []

    def watching(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            other = os.open(store.root / "lock", os.O_RDWR)
            with pytest.raises(BlockingIOError):
                real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(other)
            checked.append(fd)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", watching)
    with store.aside():
        pass
    assert len(checked) == 1


def test_an_unusable_root_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PatchctlError) as caught:
        BuildStore(tmp_path / "file" / "store")
    assert caught.value.code == "store.io_failed"


def test_import_on_a_short_disk(tmp_path: Path, store: BuildStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    base, _ = sample_builds(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(PatchctlError) as caught:
        store.import_build(base)
    assert caught.value.code == "store.disk_short"
    assert list(store.builds.iterdir()) == []
    verify_build(base)
