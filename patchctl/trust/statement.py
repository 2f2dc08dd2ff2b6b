"""The signed claim: an in-toto Statement v1 about one patch file, in canonical JSON (RFC 8785).

A bare signature over a file cannot say which channel, order or target it is for, so only statements are
signed. Format: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md, narrowed to one
subject, known fields, and bytes equal to their canonical form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import rfc8785

from engine.build import safe_path
from patchctl.trust import strictjson
from patchctl.trust.refusal import fail_closed, printable, refusal

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
HOTFIX_TYPE: Final = "https://patchctl.dev/hotfix/v1"
# In base64, beside a certificate and proofs of a few KiB, it must fit the 1 MiB line of an attestation.
STATEMENT_BYTES_MAX: Final = 512 << 10
# A patch touches tens of files and, at worst, every tensor of a model: a few thousand.
_NAMES_MAX: Final = 8192
_NAME_CHARS_MAX: Final = 255
# The integers every JSON reader agrees on (RFC 8785, section 3.2.2.3).
_INTEGER_MAX: Final = 2**53 - 1

Hex64 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
BuildDigest = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
Label = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
# Printable ASCII without spaces: what an e-mail or URI identity is made of, safe to print.
Identity = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,254}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=_INTEGER_MAX)]
Sequence = Annotated[int, msgspec.Meta(ge=1, le=_INTEGER_MAX)]
Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=_NAMES_MAX)]


class Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the patch says it changes; the verdict after the swap compares memory against it.

    Attributes:
        files: paths inside the build, sorted, unique.
        tensors: names of the tensors whose bytes change, sorted, unique.
        growth_bytes_per_request_max: host memory one request may leave behind, or None for "undeclared".
    """

    files: Names
    tensors: Names
    growth_bytes_per_request_max: Count | None


class HotfixPredicate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The predicate of ``hotfix/v1``: from which build to which, in what order, until when.

    Attributes:
        sequence: position within ``channel``, from 1, strictly rising.
        created_unix: seconds since the epoch; ``expires_unix`` likewise and later.
        base_digest: ``sha256:<64 hex>`` of the build the patch applies to; ``target_digest`` of its result.
    """

    patch_id: Label
    channel: Label
    sequence: Sequence
    created_unix: Count
    expires_unix: Count
    author: Identity
    base_digest: BuildDigest
    target_digest: BuildDigest
    engine_kind: Label
    declared: Declared


class _Digests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: Hex64


class _Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Label
    digest: _Digests


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type_: str = msgspec.field(name="_type")
    subject: tuple[_Subject, ...]
    predicate_type: str = msgspec.field(name="predicateType")
    predicate: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Statement:
    """A parsed statement.

    Attributes:
        subject_name: file name of the patch.
        subject_sha256: 64 lower-case hex digits, digest of the patch file's OCI manifest.
    """

    subject_name: str
    subject_sha256: str
    predicate: HotfixPredicate


def _sorted_unique(names: tuple[str, ...]) -> bool:
    return list(names) == sorted(set(names))


def _hotfix(fields: dict[str, Any]) -> HotfixPredicate:
    hotfix = msgspec.convert(fields, HotfixPredicate)
    if hotfix.expires_unix <= hotfix.created_unix:
        raise ValueError("expires_unix is not after created_unix")
    if hotfix.base_digest == hotfix.target_digest:
        raise ValueError("base and target are the same build")
    declared = hotfix.declared
    if not (_sorted_unique(declared.files) and _sorted_unique(declared.tensors)):
        raise ValueError("declared names are not sorted, or one is repeated")
    if not all(safe_path(path) for path in declared.files):
        raise ValueError("a declared file path is unsafe")
    if not all(1 <= len(name) <= _NAME_CHARS_MAX and name.isprintable() for name in declared.tensors):
        raise ValueError("a declared tensor name is empty, too long or not printable")
    return hotfix


# Roles to come (test results, provenance, verdicts) add their predicate type here.
_PREDICATES: Final[Mapping[str, Callable[[dict[str, Any]], HotfixPredicate]]] = {HOTFIX_TYPE: _hotfix}


def encode_hotfix(subject_name: str, subject_sha256: str, predicate: HotfixPredicate) -> bytes:
    """The canonical bytes to sign.

    Raises:
        PatchctlError: ``trust.statement_invalid``, a field is outside its limits.
    """
    with fail_closed("statement_invalid", "the statement was not made"):
        raw = rfc8785.dumps(
            {
                "_type": STATEMENT_TYPE,
                "subject": [{"name": subject_name, "digest": {"sha256": subject_sha256}}],
                "predicateType": HOTFIX_TYPE,
                "predicate": msgspec.to_builtins(predicate),
            }
        )
        decode_statement(raw)
        return raw


def decode_statement(raw: bytes) -> Statement:
    """Parse and check statement bytes.

    Raises:
        PatchctlError: ``trust.statement_too_large``, ``trust.predicate_type`` (a role this version does not
            know) or ``trust.statement_invalid`` (everything else: duplicate key, unknown or missing field,
            value outside its limits, several subjects, not canonical).
    """
    what = "the statement was not accepted"
    if len(raw) > STATEMENT_BYTES_MAX:
        raise refusal("statement_too_large", what, f"it has {len(raw)} bytes, more than {STATEMENT_BYTES_MAX}")
    with fail_closed("statement_invalid", what):
        parsed = strictjson.loads(raw)
        if rfc8785.dumps(parsed) != raw:
            raise ValueError("not in canonical form (RFC 8785)")
        envelope = msgspec.convert(parsed, _Envelope)
        if envelope.type_ != STATEMENT_TYPE:
            raise ValueError(f"_type is not {STATEMENT_TYPE}")
        if len(envelope.subject) != 1:
            raise ValueError(f"{len(envelope.subject)} subjects, expected exactly one")
        parse = _PREDICATES.get(envelope.predicate_type)
        if parse is None:
            raise refusal("predicate_type", what, f"{printable(envelope.predicate_type)!r} is not a known role")
        (subject,) = envelope.subject
        return Statement(subject.name, subject.digest.sha256, parse(envelope.predicate))
