from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from patchctl.errors import ExitCode, PatchctlError
from patchctl.trust import log
from patchctl.trust.domain import LocalDomain
from patchctl.trust.sign import sign_statement
from patchctl.trust.statement import encode_hotfix
from patchctl.trust.testing import SUBJECT_SHA256, example_hotfix


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "domain"
    LocalDomain.create(folder, "local")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "domain"))


def _refusal(folder: Path) -> PatchctlError:
    with pytest.raises(PatchctlError) as caught:
        LocalDomain.open(folder)
    return caught.value


def test_everything_is_private_and_opens_again(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(folder.iterdir())
    assert len(files) == 13
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    one, two = LocalDomain.open(folder), LocalDomain.open(folder)
    assert one.trusted_root_json() == two.trusted_root_json()
    assert one.describe() == two.describe()


def test_the_issuer_contains_the_fingerprint(folder: Path) -> None:
    domain = LocalDomain.open(folder)
    assert len(domain.fingerprint) == 64
    assert domain.issuer == f"https://local.patchctl.invalid/{domain.fingerprint[:32]}"
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    pem = subprocess.run(
        [openssl, "x509", "-in", folder / "root.crt", "-pubkey", "-noout"], capture_output=True, check=True
    ).stdout
    der = subprocess.run([openssl, "pkey", "-pubin", "-outform", "DER"], input=pem, capture_output=True, check=True)
    digest = subprocess.run([openssl, "dgst", "-sha256", "-r"], input=der.stdout, capture_output=True, check=True)
    assert digest.stdout.decode().split()[0] == domain.fingerprint


def test_two_domains_of_one_name_differ(folder: Path, tmp_path: Path) -> None:
    other = LocalDomain.create(tmp_path / "other", "local")
    assert other.fingerprint != LocalDomain.open(folder).fingerprint


def test_what_is_published_holds_no_private_key(folder: Path) -> None:
    domain = LocalDomain.open(folder)
    public = domain.trusted_root_json() + json.dumps(domain.describe())
    for key in folder.glob("*.key"):
        body = "".join(key.read_text().splitlines()[1:-1])
        assert "PRIVATE" not in public
        assert body[:60] not in public


@pytest.mark.parametrize("kind", ["file", "folder", "empty", "link"])
def test_an_existing_path_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "domain"
    if kind == "file":
        target.write_text("x")
    elif kind == "link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
        if kind == "folder":
            (target / "keep").write_text("x")
    with pytest.raises(PatchctlError) as caught:
        LocalDomain.create(target, "local")
    assert (caught.value.code, caught.value.exit_code) == ("trust.domain_exists", ExitCode.USAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["domain"]


@pytest.mark.parametrize("name", ["", "Local", "a/b", "..", "a" * 64, "-a", "a b", "a\n"])
def test_a_name_is_a_label(tmp_path: Path, name: str) -> None:
    with pytest.raises(PatchctlError) as caught:
        LocalDomain.create(tmp_path / "domain", name)
    assert caught.value.code == "trust.domain_name"
    assert not list(tmp_path.iterdir())


def test_a_failure_while_creating_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log.Log, "create", full)
    with pytest.raises(PatchctlError) as caught:
        LocalDomain.create(tmp_path / "domain", "local")
    assert caught.value.code == "trust.domain_create"
    assert not list(tmp_path.iterdir())


_DIE = """
import os, sys
from pathlib import Path
from patchctl.trust import domain, keys, log
left = int(sys.argv[2])
real = keys.write_private
def write(path, data):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    real(path, data)
keys.write_private = domain.write_private = log.write_private = write
domain.LocalDomain.create(Path(sys.argv[1]), "local")
"""


@pytest.mark.parametrize("writes", [1, 12])
def test_a_crash_while_creating_leaves_no_half_domain(tmp_path: Path, writes: int) -> None:
    target = tmp_path / "domain"
    died = subprocess.run([sys.executable, "-c", _DIE, target, str(writes)], check=False)
    assert died.returncode == 9
    assert not target.exists()
    assert _refusal(target).code == "trust.domain_absent"
    assert LocalDomain.create(target, "local").describe()["log_entries"] == 0


def test_an_absent_domain_names_the_command_that_makes_one(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path("/dev/null/none")):
        error = _refusal(path)
        assert (error.code, error.exit_code) == ("trust.domain_absent", ExitCode.NOT_FOUND)
        assert error.next_command == "patchctl trust init"


@pytest.mark.parametrize(("name", "mode"), [(".", 0o750), (".", 0o701), ("log.key", 0o640), ("domain.json", 0o622)])
def test_a_domain_others_can_touch_is_refused(folder: Path, name: str, mode: int) -> None:
    (folder / name).chmod(mode)
    error = _refusal(folder)
    assert error.code == "trust.domain_permissions"
    assert error.next_command.startswith("chmod go= ")


def test_a_domain_of_somebody_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert _refusal(folder).code == "trust.domain_permissions"


def _remove(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.parametrize("spoil", [_remove, _empty, _link])
@pytest.mark.parametrize("name", ["domain.json", "root.key", "log.key", "intermediate.crt"])
def test_a_damaged_domain_is_refused(folder: Path, name: str, spoil: Callable[[Path], None]) -> None:
    spoil(folder / name)
    assert _refusal(folder).code == "trust.domain_damaged"


@pytest.mark.parametrize(
    ("one", "other"), [("tsa.key", "ctlog.key"), ("root.crt", "tsa-root.crt"), ("log.key", "tsa.key")]
)
def test_material_that_does_not_belong_together_is_refused(folder: Path, one: str, other: str) -> None:
    shutil.copyfile(folder / other, folder / one)
    assert _refusal(folder).code == "trust.domain_damaged"


def test_a_certificate_by_another_authority_is_refused(folder: Path, tmp_path: Path) -> None:
    LocalDomain.create(tmp_path / "other", "local")
    for name in ("intermediate.crt", "intermediate.key"):
        shutil.copyfile(tmp_path / "other" / name, folder / name)
    assert _refusal(folder).code == "trust.domain_damaged"


def _sign(folder: Path) -> None:
    statement = encode_hotfix("fix.patch", SUBJECT_SHA256, example_hotfix())
    sign_statement(LocalDomain.open(folder), "a@example.com", statement)


def test_a_torn_last_line_is_removed(folder: Path) -> None:
    _sign(folder)
    entries = folder / "log.entries"
    whole = entries.read_bytes()
    entries.write_bytes(whole + b"dG9ybg")
    assert LocalDomain.open(folder).describe()["log_entries"] == 1
    assert entries.read_bytes() == whole
    _sign(folder)
    assert LocalDomain.open(folder).describe()["log_entries"] == 2


def test_an_entry_without_a_checkpoint_is_kept(folder: Path) -> None:
    _sign(folder)
    before = (folder / "log.checkpoint").read_bytes()
    _sign(folder)
    (folder / "log.checkpoint").write_bytes(before)
    assert LocalDomain.open(folder).describe()["log_entries"] == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entries: entries.write_bytes(b""),
        lambda entries: entries.write_bytes(entries.read_bytes().split(b"\n")[0] + b"\n"),
        lambda entries: entries.write_bytes(b"\n".join(entries.read_bytes().split(b"\n")[1::-1]) + b"\n"),
        lambda entries: entries.write_bytes(b"!!!\n" + entries.read_bytes()),
        lambda entries: entries.with_name("log.checkpoint").write_bytes(b"junk"),
    ],
)
def test_a_rewritten_log_signs_nothing_more(folder: Path, spoil: Callable[[Path], object]) -> None:
    _sign(folder)
    _sign(folder)
    spoil(folder / "log.entries")
    with pytest.raises(PatchctlError) as caught:
        _sign(folder)
    assert caught.value.code == "trust.log_damaged"
    with pytest.raises(PatchctlError) as caught:
        LocalDomain.open(folder).describe()
    assert caught.value.code == "trust.log_damaged"


def test_a_log_that_shrinks_under_a_running_process_is_noticed(folder: Path) -> None:
    domain = LocalDomain.open(folder)
    _sign(folder)
    assert domain.describe()["log_entries"] == 1
    (folder / "log.entries").write_bytes(b"")
    with pytest.raises(PatchctlError) as caught:
        domain.describe()
    assert "shorter" in caught.value.why


def test_a_log_that_another_process_holds_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_LOCK_WAIT_S_MAX", 0.0)
    domain = LocalDomain.open(folder)
    with (folder / "log.entries").open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(PatchctlError) as caught:
            domain.log.append(b"entry")
        assert caught.value.code == "trust.log_busy"
        assert (folder / "log.entries").read_bytes() == b""
    assert domain.log.append(b"entry").index == 0
    assert domain.log.append(b"entry").index == 1
