"""Attestation files: ``*.sigstore.jsonl``, one Sigstore bundle per line.

The rule. A file is accepted when at least one line is a valid hotfix statement about the patch and no signer
contradicts itself. A line that fails is reported, never skipped in silence, and does not refuse the file: an
unverified line grants nothing, and if it could refuse, whoever can append a byte to a mirror could block an
urgent fix. For the same reason strangers may differ from each other: in a public domain anyone can sign. Who
counts is for a policy to say; one that wants clean files can hold on :attr:`VerifiedFile.refused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from patchctl.errors import PatchctlError
from patchctl.trust.refusal import fail_closed, refusal
from patchctl.trust.statement import HotfixPredicate
from patchctl.trust.verify import LINE_BYTES_MAX, VerifiedStatement, verify_attestation

# Author, testers, approvers and a few re-signings; each line costs milliseconds to verify.
LINES_MAX: Final = 64
FILE_BYTES_MAX: Final = LINES_MAX * (LINE_BYTES_MAX + 1)
_WHAT: Final = "the patch is not attested"


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line that proves nothing: its number from 1, a stable code (``trust.*``) and the reason."""

    line: int
    code: str
    why: str


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """What an attestation file proves.

    Attributes:
        statements: at least one, in file order. Pick by signer; the first may be a stranger's.
        refused: the lines that failed; show them.
    """

    statements: tuple[VerifiedStatement, ...]
    refused: tuple[RefusedLine, ...]


def verify_file(roots: Mapping[str, str], path: Path, expected_subject_sha256: str) -> VerifiedFile:
    """Read ``path`` once and verify it; arguments and errors as in :func:`verify_lines`.

    Raises:
        PatchctlError: also ``trust.file_unreadable``.
    """
    with fail_closed("file_unreadable", _WHAT), path.open("rb") as stream:
        raw = stream.read(FILE_BYTES_MAX + 1)
    return verify_lines(roots, raw, expected_subject_sha256)


def verify_lines(roots: Mapping[str, str], raw: bytes, expected_subject_sha256: str) -> VerifiedFile:
    """Verify the content of an attestation file.

    Args:
        roots: trusted root JSON by domain name, see :func:`patchctl.trust.verify.verify_attestation`.
        raw: the whole file; a final newline is optional.
        expected_subject_sha256: 64 lower-case hex digits.

    Raises:
        PatchctlError: ``trust.too_large``, ``trust.too_many_lines``, ``trust.contradiction`` (one signer,
            two claims), ``trust.no_statement`` (several lines, none valid) or the only line's own error.
    """
    if len(raw) > FILE_BYTES_MAX:
        raise refusal("too_large", _WHAT, f"the file has more than {FILE_BYTES_MAX} bytes")
    lines = raw.removesuffix(b"\n").split(b"\n")
    if len(lines) > LINES_MAX:
        raise refusal("too_many_lines", _WHAT, f"the file has {len(lines)} lines, more than {LINES_MAX}")
    statements: list[VerifiedStatement] = []
    refused: list[RefusedLine] = []
    for number, line in enumerate(lines, start=1):
        try:
            statements.append(verify_attestation(roots, line, expected_subject_sha256))
        except PatchctlError as error:
            if len(lines) == 1:
                raise
            refused.append(RefusedLine(number, error.code, error.why))
    if not statements:
        why = "; ".join(f"line {line.line}: {line.code}: {line.why}" for line in refused)
        raise refusal("no_statement", _WHAT, why)
    said: dict[tuple[str, str, str], HotfixPredicate] = {}
    for statement in statements:
        signer = (statement.domain, statement.issuer, statement.identity)
        if said.setdefault(signer, statement.predicate) != statement.predicate:
            raise refusal("contradiction", _WHAT, f"{statement.identity} signed two different claims about it")
    return VerifiedFile(tuple(statements), tuple(refused))
