from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.build import read_manifest, verify_build
from patchctl.bundle import apply as apply_module
from patchctl.bundle.apply import apply
from patchctl.bundle.compose import compose
from patchctl.bundle.read import PatchFile
from patchctl.bundle.testing import META, NOTHING_DECLARED, sample_builds, write_build
from patchctl.errors import ExitCode, PatchctlError
from patchctl.store import BuildStore
from patchctl.store import builds as builds_module
from patchctl.store import files as files_module


class World:
    """A base in a store, a patch, and the target as its author has it."""

    def __init__(self, root: Path) -> None:
        self.base, self.target = sample_builds(root / "author")
        self.patch = compose(self.base, self.target, root / "p.patch", META, NOTHING_DECLARED).path
        self.store = BuildStore(root / "store")
        self.base_digest = self.store.import_build(self.base)
        self.target_digest = read_manifest(self.target).digest

    @property
    def base_in_store(self) -> Path:
        return self.store.path(self.base_digest)

    def apply(self, progress: Callable[[str, str], None] | None = None) -> Path:
        with PatchFile.open(self.patch) as patch:
            return apply(patch, self.base_in_store, self.store, progress=progress)

    def outcome(self) -> str:
        """``applied``, or the code of the refusal."""
        try:
            self.apply()
        except PatchctlError as error:
            return error.code
        return "applied"

    def assert_untouched(self) -> None:
        assert [path.name for path in self.store.builds.iterdir()] == [self.base_in_store.name]
        verify_build(self.base_in_store, self.base_digest)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_round_trip_with_every_kind_of_change(world: World) -> None:
    made = world.apply()
    assert made == world.store.path(world.target_digest)
    assert contents(made) == contents(world.target)
    assert world.store.list() == tuple(sorted((world.base_digest, world.target_digest)))
    assert {path.stat().st_mode & 0o777 for path in made.rglob("*") if path.is_file()} == {0o444}
    verify_build(world.base_in_store, world.base_digest)


def test_kept_files_share_storage_inside_the_store_only(world: World, tmp_path: Path) -> None:
    inode = (world.base_in_store / "tokenizer.json").stat().st_ino
    assert (world.apply() / "tokenizer.json").stat().st_ino == inode
    other = BuildStore(tmp_path / "other")
    with PatchFile.open(world.patch) as patch:
        made = apply(patch, world.base, other)
    # The author's folder is writable: a link would let it change a stored build.
    assert (made / "tokenizer.json").stat().st_nlink == 1
    assert (world.base / "tokenizer.json").stat().st_mode & 0o200


def test_kept_files_are_copied_where_links_are_impossible(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "cross-device")

    monkeypatch.setattr(os, "link", no_link)
    assert contents(world.apply()) == contents(world.target)


@pytest.mark.parametrize("answer", [0, errno.ENOSYS, errno.EXDEV, errno.EINVAL])
def test_copying_works_without_help_of_the_kernel(world: World, monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    def no_help(*_: object) -> int:
        if answer:
            raise OSError(answer, "not here")
        return 0

    monkeypatch.setattr(os, "copy_file_range", no_help)
    assert contents(world.apply()) == contents(world.target)


def test_copying_survives_short_copies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, x, y: real(a, b, min(n, 7), x, y))
    assert contents(world.apply()) == contents(world.target)


def test_writing_survives_short_writes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:7], at))
    assert contents(world.apply()) == contents(world.target)


def test_applying_twice_verifies_what_is_there(world: World) -> None:
    made = world.apply()
    steps: list[str] = []
    assert world.apply(lambda step, _: steps.append(step)) == made
    assert steps == []
    (made / "new/notes.txt").chmod(0o644)
    (made / "new/notes.txt").write_bytes(b"other")
    with pytest.raises(PatchctlError) as caught:
        world.apply()
    assert (caught.value.code, caught.value.exit_code) == ("store.build_damaged", ExitCode.SIGNATURE)


def test_a_wrong_base_is_named(world: World, tmp_path: Path) -> None:
    digest = write_build(tmp_path / "wrong", {"x": b"1"})
    with PatchFile.open(world.patch) as patch, pytest.raises(PatchctlError) as caught:
        apply(patch, tmp_path / "wrong", world.store)
    assert (caught.value.code, caught.value.exit_code) == ("patch.wrong_base", ExitCode.INCOMPATIBLE)
    assert digest in caught.value.why
    assert world.base_digest in caught.value.why
    world.assert_untouched()


def test_a_missing_base_is_refused(world: World, tmp_path: Path) -> None:
    with PatchFile.open(world.patch) as patch, pytest.raises(PatchctlError) as caught:
        apply(patch, tmp_path / "nowhere", world.store)
    assert caught.value.exit_code is ExitCode.SIGNATURE


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_rotten_base_is_noticed(world: World, name: str) -> None:
    path = world.base_in_store / name
    path.chmod(0o644)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(PatchctlError) as caught:
        world.apply()
    assert (caught.value.code, caught.value.exit_code) == ("store.build_damaged", ExitCode.SIGNATURE)
    assert [path.name for path in world.store.builds.iterdir()] == [world.base_in_store.name]


def test_a_kept_file_replaced_by_a_link_is_noticed(world: World) -> None:
    path = world.base_in_store / "tokenizer.json"
    path.rename(world.store.root / "elsewhere")
    path.symlink_to(world.store.root / "elsewhere")
    with pytest.raises(PatchctlError) as caught:
        world.apply()
    assert caught.value.exit_code is ExitCode.SIGNATURE


def test_replacing_the_path_after_opening_changes_nothing(world: World) -> None:
    with PatchFile.open(world.patch) as patch:
        evil = world.patch.with_name("evil")
        evil.write_bytes(b"x" * patch.size_bytes)
        evil.replace(world.patch)
        made = apply(patch, world.base_in_store, world.store)
    assert contents(made) == contents(world.target)


@pytest.mark.parametrize("needle", [b"added", b"LIMIT = 2", b"newnewnew"])
def test_changing_the_open_file_is_noticed(world: World, needle: bytes) -> None:
    raw = world.patch.read_bytes()
    with PatchFile.open(world.patch) as patch:
        with world.patch.open("r+b") as file:
            file.seek(raw.index(needle))
            file.write(needle.swapcase())
        with pytest.raises(PatchctlError) as caught:
            apply(patch, world.base_in_store, world.store)
    assert (caught.value.code, caught.value.exit_code) == ("patch.damaged", ExitCode.SIGNATURE)
    world.assert_untouched()


@pytest.mark.parametrize("left", [0, 4096])
def test_truncating_the_open_file_is_noticed(world: World, left: int) -> None:
    with PatchFile.open(world.patch) as patch:
        os.truncate(world.patch, left)
        with pytest.raises(PatchctlError) as caught:
            apply(patch, world.base_in_store, world.store)
    assert caught.value.code == "patch.damaged"
    world.assert_untouched()


def test_a_full_disk_is_foreseen_with_the_arithmetic(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(PatchctlError) as caught:
        world.apply()
    assert (caught.value.code, caught.value.exit_code) == ("store.disk_short", ExitCode.HELD)
    assert "free 1000" in caught.value.why
    assert "short by" in caught.value.why
    world.assert_untouched()


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "store.disk_short"), (errno.EDQUOT, "store.disk_short"), (errno.EIO, "store.io_failed")],
)
@pytest.mark.parametrize("function", ["pwrite", "copy_file_range", "fsync", "fchmod", "mkdir", "rename"])
def test_a_failing_disk_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, function: str, number: int, code: str
) -> None:
    """Let each call of each kind of system call fail once, in turn, until an apply makes none that fails."""
    real = getattr(os, function)
    for allowed in itertools.count():
        calls = itertools.count()

        def failing(*args: object, allowed: int = allowed, calls: Iterator[int] = calls, **kwargs: object) -> object:
            if next(calls) == allowed:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        with monkeypatch.context() as broken:
            broken.setattr(os, function, failing)
            found = world.outcome()
        if found == "applied":
            break
        assert found == code
        # Only syncing the folder above can fail after the build is complete.
        left = set(world.store.list()) - {world.base_digest}
        assert not left or function == "fsync"
        for digest in left:
            world.store.verify(digest)
            world.store.remove(digest)
        world.assert_untouched()
    assert allowed > 0
    assert contents(world.store.path(world.target_digest)) == contents(world.target)


def test_an_abort_by_the_caller_leaves_nothing(world: World) -> None:
    for stop in ("aside", "place", "verify", "install"):

        def interrupt(step: str, detail: str, stop: str = stop) -> None:
            if step == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            world.apply(interrupt)
        world.assert_untouched()


def test_the_final_hash_decides(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(path: Path, content: bytes) -> None:
        files_module.write_file(path, content)
        (path.parent / "surplus").write_bytes(b"x")

    monkeypatch.setattr(apply_module, "write_file", corrupt)
    with pytest.raises(PatchctlError, match="surplus"):
        world.apply()
    world.assert_untouched()


def test_two_writers_of_one_build_agree(world: World) -> None:
    def second(step: str, detail: str) -> None:
        if step == "install":
            world.apply()

    made = world.apply(second)
    assert contents(made) == contents(world.target)
    assert sorted(path.name for path in world.store.builds.iterdir()) == sorted((made.name, world.base_in_store.name))
    assert builds_module.BuildStore(world.store.root).list() == world.store.list()
