from __future__ import annotations

from pathlib import Path

import pytest

from patchctl.errors import ExitCode, PatchctlError
from patchctl.trust.attestations import FILE_BYTES_MAX, LINES_MAX, verify_file, verify_lines
from patchctl.trust.domain import LocalDomain
from patchctl.trust.sign import sign_statement
from patchctl.trust.statement import encode_hotfix
from patchctl.trust.testing import SUBJECT_SHA256, example_hotfix

_HOTFIX = example_hotfix()


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> LocalDomain:
    return LocalDomain.create(tmp_path_factory.mktemp("trust") / "domain", "local")


@pytest.fixture(scope="module")
def roots(domain: LocalDomain) -> dict[str, str]:
    return {"local": domain.trusted_root_json()}


def _line(
    domain: LocalDomain, identity: str = "a@example.com", subject: str = SUBJECT_SHA256, sequence: int = 1
) -> bytes:
    hotfix = example_hotfix(sequence=sequence, created_unix=_HOTFIX.created_unix, expires_unix=_HOTFIX.expires_unix)
    return sign_statement(domain, identity, encode_hotfix("fix.patch", subject, hotfix)).encode() + b"\n"


def _refusal(roots: dict[str, str], raw: bytes) -> PatchctlError:
    with pytest.raises(PatchctlError) as caught:
        verify_lines(roots, raw, SUBJECT_SHA256)
    assert caught.value.exit_code is ExitCode.SIGNATURE
    return caught.value


def test_a_file_of_two_signers(domain: LocalDomain, roots: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "fix.sigstore.jsonl"
    path.write_bytes(_line(domain) + _line(domain, "b@example.com"))
    verified = verify_file(roots, path, SUBJECT_SHA256)
    assert [statement.identity for statement in verified.statements] == ["a@example.com", "b@example.com"]
    assert {statement.predicate.sequence for statement in verified.statements} == {1}
    assert verified.refused == ()


def test_the_final_newline_is_optional(domain: LocalDomain, roots: dict[str, str]) -> None:
    line = _line(domain)
    with_newline, without = (verify_lines(roots, raw, SUBJECT_SHA256) for raw in (line, line[:-1]))
    assert with_newline == without


def test_a_failing_line_is_reported_and_grants_nothing(domain: LocalDomain, roots: dict[str, str]) -> None:
    other = _line(domain, "mallory@example.com", subject="6" * 64)
    raw = other + b"\n" + _line(domain) + b"junk\n" + b"x" * ((1 << 20) + 1) + b"\n"
    verified = verify_lines(roots, raw, SUBJECT_SHA256)
    assert [statement.identity for statement in verified.statements] == ["a@example.com"]
    assert [(line.line, line.code) for line in verified.refused] == [
        (1, "trust.subject_mismatch"),
        (2, "trust.bundle_malformed"),
        (4, "trust.bundle_malformed"),
        (5, "trust.too_large"),
    ]
    assert all(line.why for line in verified.refused)


def test_no_valid_line_refuses_with_every_reason(domain: LocalDomain, roots: dict[str, str]) -> None:
    error = _refusal(roots, _line(domain, subject="6" * 64) + b"junk\n")
    assert error.code == "trust.no_statement"
    assert "line 1: trust.subject_mismatch" in error.why
    assert "line 2: trust.bundle_malformed" in error.why


def test_the_only_line_speaks_for_itself(domain: LocalDomain, roots: dict[str, str]) -> None:
    assert _refusal(roots, _line(domain, subject="6" * 64)).code == "trust.subject_mismatch"
    assert _refusal(roots, b"").code == "trust.bundle_malformed"


def test_a_signer_that_contradicts_itself_is_refused(domain: LocalDomain, roots: dict[str, str]) -> None:
    error = _refusal(roots, _line(domain) + _line(domain, "b@example.com") + _line(domain, sequence=2))
    assert error.code == "trust.contradiction"
    assert error.why.startswith("a@example.com")


def test_a_stranger_cannot_block_a_patch_by_claiming_something_else(domain: LocalDomain, roots: dict[str, str]) -> None:
    verified = verify_lines(roots, _line(domain, "stranger@example.com", sequence=9) + _line(domain), SUBJECT_SHA256)
    assert [statement.predicate.sequence for statement in verified.statements] == [9, 1]


def test_the_number_of_lines_is_bounded(domain: LocalDomain, roots: dict[str, str]) -> None:
    raw = _line(domain) + b"\n" * (LINES_MAX - 1)
    assert len(verify_lines(roots, raw, SUBJECT_SHA256).refused) == LINES_MAX - 1
    assert _refusal(roots, raw + b"\n").code == "trust.too_many_lines"


def test_the_size_is_bounded(roots: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "huge.sigstore.jsonl"
    with path.open("wb") as out:
        out.truncate(FILE_BYTES_MAX + 1)
    with pytest.raises(PatchctlError) as caught:
        verify_file(roots, path, SUBJECT_SHA256)
    assert caught.value.code == "trust.too_large"


def test_a_file_that_is_not_there_is_explained(roots: dict[str, str], tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(PatchctlError) as caught:
            verify_file(roots, path, SUBJECT_SHA256)
        assert caught.value.code == "trust.file_unreadable"
