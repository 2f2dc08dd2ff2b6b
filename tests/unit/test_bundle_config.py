from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import rfc8785

from patchctl.bundle.compose import compose
from patchctl.bundle.config import Declared, PatchConfig
from patchctl.bundle.consistency import ConfigInvalidError, check_paths
from patchctl.bundle.declaration import undeclared
from patchctl.bundle.decode import CONFIG_BYTES_MAX, ConfigUnsupportedError, decode_config
from patchctl.bundle.read import PatchFile
from patchctl.bundle.testing import META, NOTHING_DECLARED, sample_builds

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PatchConfig:
    root = tmp_path_factory.mktemp("config")
    base, target = sample_builds(root)
    info = compose(base, target, root / "p.patch", META, NOTHING_DECLARED)
    with PatchFile.open(info.path) as patch:
        return patch.config


def _set(*keys: str | int, to: Any) -> Change:
    def change(data: dict[str, Any]) -> None:
        *way, last = keys
        place: Any = data
        for key in way:
            place = place[key]
        place[last] = to

    return change


def _drop(*keys: str | int) -> Change:
    def change(data: dict[str, Any]) -> None:
        *way, last = keys
        place: Any = data
        for key in way:
            place = place[key]
        del place[last]

    return change


def _append(key: str, value: Any) -> Change:
    return lambda data: data[key].append(value)


# files: 0 model.safetensors (tensor-delta), 1 new/notes.txt (put), 2 request_path.py (put), 3 tokenizer.json (keep)
CHANGES: dict[str, Change] = {
    "unknown field": _set("surprise", to=1),
    "unknown field of an action": _set("files", 0, "mode", to=511),
    "unknown action": _set("files", 0, "action", to="exec"),
    "missing default": _drop("constraints", "device_kinds"),
    "missing field": _drop("author"),
    "schema version as text": _set("schema_version", to="1"),
    "negative sequence": _set("sequence", to=-1),
    "negative size": _set("files", 1, "size_bytes", to=-5),
    "huge number": _set("sequence", to=2**53),
    "float": _set("sequence", to=7.5),
    "expired before created": _set("expires_unix", to=META.created_unix),
    "patch id with slash": _set("patch_id", to="a/b"),
    "patch id with newline": _set("patch_id", to="fix\n"),
    "empty author": _set("author", to=""),
    "author that moves the cursor": _set("author", to="dev\x1b[2J"),
    "upper-case digest": _set("base_digest", to="sha256:" + "A" * 64),
    "digest of another algorithm": _set("base_digest", to="md5:" + "0" * 64),
    "digest with newline": _set("base_digest", to="sha256:" + "0" * 64 + "\n"),
    "wrong target digest": _set("target_digest", to="sha256:" + "0" * 64),
    "target manifest of other content": _set("target_manifest", "version", to="3"),
    "other engine": _set("engine_kind", to="vllm"),
    "unsorted files": lambda data: data["files"].reverse(),
    "file missing": _drop("files", 3),
    "file listed twice": lambda data: data["files"].append(data["files"][-1]),
    "other size": _set("files", 1, "size_bytes", to=6),
    "other sha256": _set("files", 3, "sha256", to="0" * 64),
    "layer that is not the file": _set("files", 1, "layer", to="sha256:" + "0" * 64),
    "put by itself": lambda data: data["files"][1].update(old_sha256=data["files"][1]["sha256"]),
    "delta by itself": lambda data: data["files"][0].update(old_sha256=data["files"][0]["sha256"]),
    "removed and kept": _set("removed", to=["tokenizer.json"]),
    "removed outside": _set("removed", to=["../etc/passwd"]),
    "removed absolute": _set("removed", to=["/etc/passwd"]),
    "removed twice": _set("removed", to=["old", "old"]),
    "removed manifest": _set("removed", to=["build.json"]),
    "no tensors": _set("files", 0, "tensors", to=[]),
    "tensor twice": lambda data: data["files"][0]["tensors"].append(data["files"][0]["tensors"][0]),
    "pack offset": _set("files", 0, "tensors", 0, "pack_offset", to=1),
    "tensor by itself": lambda data: data["files"][0]["tensors"][0].update(
        old_sha256=data["files"][0]["tensors"][0]["sha256"]
    ),
    "tensor size against shape": _set("files", 0, "tensors", 0, "shape", to=[601]),
    "unknown dtype": _set("files", 0, "tensors", 0, "dtype", to="F31"),
    "unprintable tensor name": _set("files", 0, "tensors", 0, "name", to="a\nb"),
    "no pack": _set("tensor_pack", to=None),
    "larger pack": _set("tensor_pack", "size_bytes", to=601),
    "too many removals": _set("removed", to=[f"f{i:05}" for i in range(4097)]),
    "declared text": _set("declared", "files", to="all"),
    "negative growth": _set("declared", "growth_bytes_per_request_max", to=-1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_contradictions_are_refused(config: PatchConfig, name: str) -> None:
    data = msgspec.to_builtins(config)
    data = json.loads(rfc8785.dumps(data))
    CHANGES[name](data)
    try:
        raw = rfc8785.dumps(data)
    except rfc8785.IntegerDomainError:
        raw = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(ConfigInvalidError):
        decode_config(raw)


def test_another_encoding_of_the_same_config_is_refused(config: PatchConfig) -> None:
    raw = config.encode()
    assert decode_config(raw) == config
    for other in (
        raw + b" ",
        raw.replace(b'"sequence":7', b'"sequence":7.0'),
        raw.replace(b'"sequence":7', b'"sequence":7e0'),
        raw.replace(b'"sequence":7', b'"sequence":7,"sequence":7'),
        raw.replace(b'"sequence":7', b'"sequence":8,"sequence":7'),
        raw.replace(b'"stable"', b'"\\u0073table"'),
        raw.replace(b'"stable"', b'"\\ud800"'),
        raw.replace(b'"stable"', b'"\xff"'),
        json.dumps(json.loads(raw), indent=1).encode(),
        b"[" * 100_000,
        b'{"schema_version":1,"x":' + b"[" * 100_000,
    ):
        with pytest.raises(ConfigInvalidError):
            decode_config(other)


def test_size_cap_comes_before_parsing() -> None:
    with pytest.raises(ConfigInvalidError, match="more than"):
        decode_config(b" " * (CONFIG_BYTES_MAX + 1))


def test_later_schema_is_named_as_such(config: PatchConfig) -> None:
    with pytest.raises(ConfigUnsupportedError, match="version 2"):
        decode_config(config.encode().replace(b'"schema_version":1', b'"schema_version":2'))


@pytest.mark.parametrize(
    "paths",
    [
        ["A", "a"],
        ["caf\u00e9", "cafe\u0301"],
        ["STRASSE", "stra\u00dfe"],
        ["a", "a/b"],
        ["a", "a/b/c"],
        ["b", "a"],
        ["a", "a"],
        ["a\nb"],
        ["a\\b"],
        ["./a"],
        ["a//b"],
        ["a/"],
        [""],
        ["Build.json"],
        ["build.json/x"],
        ["\u00e9" * 200],
        ["a\u202eb"],
    ],
)
def test_confusable_paths_are_refused(paths: list[str]) -> None:
    with pytest.raises(ConfigInvalidError):
        check_paths(sorted(paths) if len(set(paths)) == len(paths) and paths != ["b", "a"] else paths)


def _declare(config: PatchConfig, files: tuple[str, ...], tensors: tuple[str, ...]) -> PatchConfig:
    declared = Declared(files=files, tensors=tensors, growth_bytes_per_request_max=None, summary="")
    return msgspec.structs.replace(config, declared=declared)


ALL_FILES = ("new/notes.txt", "old/gone.txt", "request_path.py")


@pytest.mark.parametrize(
    ("files", "tensors", "missing"),
    [
        ((), (), (ALL_FILES, ("layers.2.weight",))),
        (ALL_FILES, ("layers.2.weight",), ((), ())),
        (ALL_FILES, ("layers.*.weight",), ((), ())),
        (ALL_FILES, ("layers.[13].weight",), ((), ("layers.2.weight",))),
        (ALL_FILES, ("LAYERS.2.WEIGHT",), ((), ("layers.2.weight",))),
        ((*ALL_FILES, "model.safetensors"), (), ((), ())),
        (("new/notes.txt", "request_path.py"), ("*",), (("old/gone.txt",), ())),
        (("new/*", "old/*", "request_path.py"), ("*",), (("new/notes.txt", "old/gone.txt"), ())),
    ],
)
def test_declaration_coverage(
    config: PatchConfig, files: tuple[str, ...], tensors: tuple[str, ...], missing: Any
) -> None:
    found = undeclared(_declare(config, files, tensors))
    assert found == missing
    assert found.coverage == ("complete" if missing == ((), ()) else "partial")


def test_a_declared_name_may_hold_glob_characters(config: PatchConfig) -> None:
    delta = config.tensor_deltas[0]
    renamed = msgspec.structs.replace(delta, tensors=(msgspec.structs.replace(delta.tensors[0], name="w[0]"),))
    odd = msgspec.structs.replace(config, files=(renamed, *config.files[1:]))
    assert undeclared(_declare(odd, ALL_FILES, ("w[0]",))).coverage == "complete"
