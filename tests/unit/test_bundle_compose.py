from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.build import BuildInvalidError
from patchctl.bundle import compose as compose_module
from patchctl.bundle.compose import compose
from patchctl.bundle.config import Declared, Keep, Put, TensorDelta
from patchctl.bundle.describe import describe
from patchctl.bundle.read import PatchFile
from patchctl.bundle.testing import META, NOTHING_DECLARED, REQUEST_PATH, safetensors_bytes, sample_builds, write_build
from patchctl.errors import ExitCode, PatchctlError


def _composed(base: Path, target: Path, out: Path) -> bytes:
    return compose(base, target, out, META, NOTHING_DECLARED).path.read_bytes()


def _actions(root: Path, old: dict[str, bytes], new: dict[str, bytes]) -> dict[str, Any]:
    write_build(root / "a", old)
    write_build(root / "b", new, version="2")
    compose(root / "a", root / "b", root / "p", META, NOTHING_DECLARED)
    with PatchFile.open(root / "p") as patch:
        return {action.path: action for action in patch.config.files if action.path != REQUEST_PATH}


def test_the_info_names_what_changes(tmp_path: Path) -> None:
    base, target = sample_builds(tmp_path)
    steps = []
    declared = Declared(files=("old/gone.txt",), tensors=("layers.*",), growth_bytes_per_request_max=0, summary="x")
    info = compose(base, target, tmp_path / "p", META, declared, progress=lambda step, _: steps.append(step))
    assert info.actions == {"keep": 1, "put": 2, "tensor-delta": 1, "removed": 1}
    assert info.changed_files == ("model.safetensors", "new/notes.txt", "old/gone.txt", "request_path.py")
    assert info.changed_tensors == ("layers.2.weight",)
    assert info.undeclared == (("new/notes.txt", "request_path.py"), ())
    assert info.size_bytes == (tmp_path / "p").stat().st_size
    assert info.build_size_bytes == sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    assert {"verify", "compare", "write"} <= set(steps)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "p", "target"]


def test_same_inputs_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, target = sample_builds(tmp_path / "one")
    first = _composed(base, target, tmp_path / "first.patch")
    other = tmp_path / "other"
    for source in (base, target):
        # The same files, created in the opposite order, with other times and modes.
        for path in sorted(source.rglob("*"), reverse=True):
            if path.is_file():
                copy = other / source.name / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
                os.utime(copy, (1, 1))
                copy.chmod(0o600)
    monkeypatch.chdir(other)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    old_umask = os.umask(0o077)
    try:
        assert _composed(Path("base"), Path("target"), Path("second.patch")) == first
    finally:
        os.umask(old_umask)
    assert _composed(base, target, tmp_path / "first.patch") == first


def test_one_changed_tensor_travels_alone(tmp_path: Path) -> None:
    tensors = {name: os.urandom(4096) for name in "abcd"}
    actions = _actions(
        tmp_path,
        {"w.safetensors": safetensors_bytes(tensors)},
        {"w.safetensors": safetensors_bytes({**tensors, "c": os.urandom(4096)})},
    )
    delta = actions["w.safetensors"]
    assert isinstance(delta, TensorDelta)
    assert [(change.name, change.dtype, change.shape) for change in delta.tensors] == [("c", "U8", (4096,))]
    assert (tmp_path / "p").stat().st_size < 4096 + 8192


@pytest.mark.parametrize(
    "new",
    [
        {"a": b"2" * 4096, "b": b"2" * 4096},
        {"b": b"1" * 4096, "a": b"2" * 4096},
        {"a": b"1" * 4096, "c": b"2" * 4096},
        {"a": b"1" * 4095, "b": b"2" * 4097},
        {"a": b"1" * 8192},
    ],
    ids=["all changed", "reordered", "renamed", "other shapes", "fewer"],
)
def test_other_headers_or_nothing_saved_means_whole(tmp_path: Path, new: dict[str, bytes]) -> None:
    old = safetensors_bytes({"a": b"1" * 4096, "b": b"1" * 4096})
    actions = _actions(tmp_path, {"w.safetensors": old}, {"w.safetensors": safetensors_bytes(new)})
    assert isinstance(actions["w.safetensors"], Put)


def test_what_is_no_safetensors_file_travels_whole(tmp_path: Path) -> None:
    actions = _actions(
        tmp_path,
        {"w.safetensors": b"\xff" * 64, "same.bin": b"s", "empty": b""},
        {"w.safetensors": b"\xfe" * 64, "same.bin": b"s", "empty2": b""},
    )
    assert [type(action) for action in actions.values()] == [Put, Keep, Put]
    assert actions["w.safetensors"].old_sha256 is not None
    assert actions["empty2"].old_sha256 is None


def test_equal_contents_travel_once(tmp_path: Path) -> None:
    blob = os.urandom(100_000)
    _actions(tmp_path, {}, {"x.bin": blob, "y/x.bin": blob})
    assert (tmp_path / "p").stat().st_size < 110_000


def test_a_patch_without_layers_has_the_empty_one(tmp_path: Path) -> None:
    _actions(tmp_path, {"x": b"1"}, {"x": b"1"})
    with PatchFile.open(tmp_path / "p") as patch:
        layers = json.loads(patch.manifest)["layers"]
    assert [layer["mediaType"] for layer in layers] == ["application/vnd.oci.empty.v1+json"]


def test_unsound_builds_are_refused(tmp_path: Path) -> None:
    base, target = sample_builds(tmp_path)
    for folder in (base, target):
        path = folder / "tokenizer.json"
        good = path.read_bytes()
        path.write_bytes(b"[" + good[1:])
        with pytest.raises(PatchctlError) as caught:
            compose(base, target, tmp_path / "p", META, NOTHING_DECLARED)
        assert (caught.value.code, caught.value.exit_code) == ("build.invalid", ExitCode.SIGNATURE)
        path.write_bytes(good)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"patch_id": "a b"},
        {"sequence": -1},
        {"sequence": 2**60},
        {"expires_unix": 0},
        {"author": ""},
        {"author": "\ud800"},
        {"device_kinds": ("c u d a",)},
    ],
)
def test_what_the_reader_would_refuse_is_not_written(tmp_path: Path, change: dict[str, Any]) -> None:
    base, target = sample_builds(tmp_path)
    with pytest.raises(PatchctlError) as caught:
        compose(base, target, tmp_path / "p", dataclasses.replace(META, **change), NOTHING_DECLARED)
    assert (caught.value.code, caught.value.exit_code) == ("patch.unbuildable", ExitCode.USAGE)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("name", ["x\ny", "x\x7f", "é" * 64 + "/" + "é" * 64, "a\\b"])
def test_confusable_names_are_not_sealed(tmp_path: Path, name: str) -> None:
    with pytest.raises(BuildInvalidError, match="unsafe path"):
        write_build(tmp_path / "a", {name: b"1"})


@pytest.mark.parametrize("name", ["new/notes.txt", "model.safetensors"])
def test_a_build_that_changes_meanwhile_is_noticed(tmp_path: Path, name: str) -> None:
    base, target = sample_builds(tmp_path)
    (tmp_path / "p").write_bytes(b"older patch")

    def alter(step: str, detail: str) -> None:
        if step == "write":
            content = (target / name).read_bytes()
            (target / name).write_bytes(content.replace(b"new", b"odd").replace(b"added", b"wrong"))

    with pytest.raises(PatchctlError) as caught:
        compose(base, target, tmp_path / "p", META, NOTHING_DECLARED, progress=alter)
    assert caught.value.code == "patch.source_changed"
    assert (tmp_path / "p").read_bytes() == b"older patch"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "p", "target"]


def test_a_full_disk_leaves_the_older_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, target = sample_builds(tmp_path)
    (tmp_path / "p").write_bytes(b"older patch")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compose_module, "write_layout", fail)
    with pytest.raises(PatchctlError, match="No space left"):
        compose(base, target, tmp_path / "p", META, NOTHING_DECLARED)
    assert (tmp_path / "p").read_bytes() == b"older patch"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "p", "target"]


def test_describe_is_json_and_complete(tmp_path: Path) -> None:
    base, target = sample_builds(tmp_path)
    compose(base, target, tmp_path / "p", META, NOTHING_DECLARED)
    with PatchFile.open(tmp_path / "p") as patch:
        shown = json.loads(json.dumps(describe(patch)))
        assert shown["manifest_digest"] == patch.manifest_digest
    assert [(change["path"], change["change"]) for change in shown["changes"]] == [
        ("model.safetensors", "tensors"),
        ("new/notes.txt", "add"),
        ("request_path.py", "replace"),
    ]
    assert shown["removed"] == ["old/gone.txt"]
    assert (shown["kept_files"], shown["coverage"]) == (1, "partial")
