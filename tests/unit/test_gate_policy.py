from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from patchctl.admission.policy import Module, check_policy, load_default, load_folder
from patchctl.errors import ExitCode, PatchctlError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "policies"
    shutil.copytree(str(files("policies")), copy)
    return copy


def refusal(folder: Path) -> str:
    with pytest.raises(PatchctlError) as caught:
        load_folder(folder)
    assert (caught.value.code, caught.value.exit_code) == ("policy.invalid", ExitCode.POLICY_DENIED)
    return caught.value.why


def edit_config(folder: Path, change: Any) -> None:
    path = folder / "patchctl" / "config" / "data.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_default_and_its_copy_have_one_revision(folder: Path) -> None:
    shipped, copied = load_default(), load_folder(folder)
    assert copied == shipped
    assert copied.revision == shipped.revision
    assert {module.name for module in shipped.modules} >= {"main.rego", "lib/checks.rego"}
    assert all(module.name.endswith("_test.rego") for module in shipped.tests)


def test_nobody_is_trusted_by_default_and_local_not_in_production() -> None:
    config = load_default().data["patchctl"]["config"]
    assert config["identities"] == []
    assert "local" not in config["environments"]["production"]["domains"]
    assert config["declaration_partial"] == "deny"


def test_digests_name_modules_and_data_apart(folder: Path) -> None:
    before = load_folder(folder)
    edit_config(folder, lambda config: config.update(clock_skew_s=1))
    data_changed = load_folder(folder)
    assert data_changed.policy_digest == before.policy_digest
    assert data_changed.data_digest != before.data_digest
    assert data_changed.revision != before.revision
    main = folder / "main.rego"
    main.write_text(main.read_text() + "\n")
    rules_changed = load_folder(folder)
    assert rules_changed.policy_digest != before.policy_digest
    assert rules_changed.revision != data_changed.revision


def test_tests_are_of_no_digest(folder: Path) -> None:
    before = load_folder(folder)
    (folder / "tests" / "gate_test.rego").unlink()
    assert load_folder(folder).revision == before.revision


def test_with_data_merges_and_leaves_the_original(folder: Path) -> None:
    policy = load_default()
    changed = policy.with_data({"environments": {"lab": {"levels": {"provenance_missing": "deny"}}}})
    config = changed.data["patchctl"]["config"]
    assert config["environments"]["lab"]["levels"]["provenance_missing"] == "deny"
    assert config["environments"]["lab"]["levels"]["clock_unsynced"] == "pass"
    assert policy == load_default()
    assert policy.with_data({}) == policy


@pytest.mark.parametrize(
    "overrides",
    [
        {"identites": []},
        {"declaration_partial": "Deny"},
        {"declaration_partial": None},
        {"clock_skew_s": 1.5},
        {"clock_skew_s": -1},
        {"environments": {"prod": {"domains": [], "levels": {}}}},
        {"environments": {"lab": None}},
        {"environments": {"lab": {"levels": {"memory_unknown": "pass"}}}},
        {"identities": [{"domain": "public", "issuer": "i", "identity": "", "channels": ["stable"]}]},
        {"identities": [{"domain": "public", "issuer": "i", "identity": "a", "channels": []}]},
        {"identities": [{"domain": "public", "identity": "a", "channels": ["stable"]}]},
        {"clock_skew_s": 2**60},
        {"identities": object()},
    ],
)
def test_with_data_refuses_settings_that_do_not_fit(overrides: dict[str, Any]) -> None:
    with pytest.raises(PatchctlError) as caught:
        load_default().with_data(overrides)
    assert caught.value.code == "policy.invalid"


@pytest.mark.parametrize(
    "path",
    ["patchctl/gate", "patchctl/checks/replay", "patchctl/lib"],
)
def test_data_may_not_overlap_rules(folder: Path, path: str) -> None:
    target = folder / path
    target.mkdir(parents=True)
    (target / "data.json").write_text('{"checks": {"decision": {"outcome": "allow"}}}')
    assert "overlaps" in refusal(folder)


def test_data_may_not_replace_a_parent_of_a_package(folder: Path) -> None:
    (folder / "patchctl" / "data.json").write_text('{"checks": 1}')
    assert "overlaps" in refusal(folder)


def test_only_our_root_is_used(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "data.json").write_text("{}")
    assert "root" in refusal(folder)
    policy = load_default()
    foreign = replace(policy, modules=(*policy.modules, Module("x.rego", "package other\n\nx := 1\n")))
    with pytest.raises(PatchctlError, match="not below patchctl"):
        check_policy(foreign)


def test_lint_runs_on_load(folder: Path) -> None:
    (folder / "checks" / "extra.rego").write_text("package patchctl.extra\n\nx := time.now_ns()\n")
    assert "checks/extra.rego:3" in refusal(folder)


@pytest.mark.parametrize(
    "text", ['{"clock_skew_s": 1.0}', '{"clock_skew_s": NaN}', "{", "[" * 100_000, '{"a": "\\ud800"}']
)
def test_refuses_data_that_is_not_plain_json(folder: Path, text: str) -> None:
    (folder / "patchctl" / "config" / "data.json").write_text(text)
    refusal(folder)


def test_refuses_links_large_and_missing_folders(folder: Path, tmp_path: Path) -> None:
    (folder / "lib" / "link.rego").symlink_to(folder / "main.rego")
    assert "link" in refusal(folder)
    (folder / "lib" / "link.rego").unlink()
    (folder / "lib" / "large.rego").write_text("#" * (1 << 20) + "\n")
    assert "bytes" in refusal(folder)
    refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty")


def test_refuses_a_module_that_is_not_utf8(folder: Path) -> None:
    (folder / "lib" / "bad.rego").write_bytes(b"package patchctl.bad\n# \xff\n")
    refusal(folder)
