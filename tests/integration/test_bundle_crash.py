"""A host that dies or fills up while a patch is applied."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.build import read_manifest, verify_build
from patchctl.bundle.apply import apply
from patchctl.bundle.compose import compose
from patchctl.bundle.read import PatchFile
from patchctl.bundle.testing import META, NOTHING_DECLARED, sample_builds, write_build
from patchctl.errors import PatchctlError
from patchctl.store import BuildStore
from patchctl.store import failure as failure_module

MIB = 1 << 20
SPAWN = multiprocessing.get_context("spawn")
STEPS = [
    ("aside", ""),
    ("place", "model.safetensors"),
    ("place", "new/notes.txt"),
    ("place", "request_path.py"),
    ("place", "tokenizer.json"),
    ("verify", ""),
    ("install", ""),
    ("installed", ""),
]


def _apply_and_die(patch: Path, base: str, root: Path, step: str, detail: str) -> None:
    def die(now: str, what: str) -> None:
        if now == step and detail in ("", what):
            os.kill(os.getpid(), signal.SIGKILL)

    with PatchFile.open(patch) as opened:
        store = BuildStore(root)
        apply(opened, store.path(base), store, progress=die)


@pytest.mark.parametrize(("step", "detail"), STEPS)
def test_kill_9_leaves_whole_builds_only(tmp_path: Path, step: str, detail: str) -> None:
    base, target = sample_builds(tmp_path)
    patch = compose(base, target, tmp_path / "p", META, NOTHING_DECLARED).path
    store = BuildStore(tmp_path / "store")
    digest = store.import_build(base)
    child = SPAWN.Process(target=_apply_and_die, args=(patch, digest, store.root, step, detail))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    made = store.path(read_manifest(target).digest)
    assert made.exists() == (step == "installed")
    assert any(path.name.startswith(".aside-") for path in store.builds.iterdir()) == (step != "installed")
    for listed in store.list():
        store.verify(listed)
    reopened = BuildStore(store.root)
    assert not any(path.name.startswith(".aside-") for path in store.builds.iterdir())
    with PatchFile.open(patch) as opened:
        assert apply(opened, reopened.path(digest), reopened) == made
    verify_build(made, read_manifest(target).digest)
    reopened.verify(digest)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)  # noqa: S607 - the system's own


def _large_patch(root: Path) -> tuple[Path, Path, Path]:
    base, target = root / "a", root / "b"
    write_build(base, {"small.bin": b"s" * MIB})
    write_build(target, {"small.bin": b"s" * MIB, "large.bin": os.urandom(12 * MIB)}, version="2")
    return base, target, compose(base, target, root / "p", META, NOTHING_DECLARED).path


def test_a_disk_that_fills_up_leaves_the_old_build(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _, patch = _large_patch(tmp_path)
    monkeypatch.setattr(failure_module, "RESERVE_BYTES", 0)
    store = BuildStore(small_disk / "store")
    digest = store.import_build(base)
    free_bytes = shutil.disk_usage(small_disk).free
    with PatchFile.open(patch) as opened:
        with pytest.raises(PatchctlError) as caught:
            apply(opened, store.path(digest), store)
        assert caught.value.code == "store.disk_short"
        assert "short by" in caught.value.why

        class Usage:
            free = 1 << 40

        with monkeypatch.context() as lying:
            lying.setattr("shutil.disk_usage", lambda _: Usage)
            with pytest.raises(PatchctlError) as caught:
                apply(opened, store.path(digest), store)
    assert caught.value.code == "store.disk_short"
    assert "filled up" in caught.value.why
    assert store.list() == (digest,)
    store.verify(digest)
    assert [path.name for path in store.builds.iterdir()] == [store.path(digest).name]
    assert shutil.disk_usage(small_disk).free == free_bytes


def _apply_with_file_limit(patch: Path, base: str, root: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
    store = BuildStore(root)
    with PatchFile.open(patch) as opened:
        try:
            apply(opened, store.path(base), store)
        except PatchctlError as error:
            os._exit(42 if error.code == "store.disk_short" else 1)


def test_a_file_size_limit_leaves_the_old_build(tmp_path: Path) -> None:
    base, target, patch = _large_patch(tmp_path)
    store = BuildStore(tmp_path / "store")
    digest = store.import_build(base)
    child = SPAWN.Process(target=_apply_with_file_limit, args=(patch, digest, store.root))
    child.start()
    child.join(60)
    assert child.exitcode == 42
    assert [path.name for path in store.builds.iterdir()] == [store.path(digest).name]
    with PatchFile.open(patch) as opened:
        verify_build(apply(opened, store.path(digest), store), read_manifest(target).digest)
