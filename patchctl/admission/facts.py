"""The gate's input: every fact a policy may judge, computed by patchctl, never copied from a patch's claims.

Closed enums, no optional keys, no floats, integers below 2**53: a policy engine given untyped input
compared across types and produced wrong allows in our trials, so nothing untyped reaches one.
A field's docstring names who computes it: *agent* (from the host: clock, journal, engine), *trust*
(the verifying pipeline), *bundle* (the patch file reader) or *snapshots* (memory capture and verdict).
Whenever a fact cannot be computed, the field takes its weakest value (``unknown``, ``missing``,
``absent``), never an assumed one.

On ``rollback`` the patch is the transition to undo: ``patch.base_digest`` is the build to leave,
``patch.target_digest`` the recorded build to return to, and the evidence is what the host recorded
when that build was admitted.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import rfc8785
from msgspec import Meta

INTEGER_MAX = 2**53 - 1  # the largest integer every JSON reader and Rego engine keeps exactly (RFC 8785)
APPLIED_IDS_MAX = 4096  # newest first is enough: older replays fail on the sequence; bounds the input's size
# No control characters: engines and terminals disagree on them. A look-ahead, because "$" lets a newline pass.
_PRINTABLE = r"^(?![\s\S]*[\x00-\x1f\x7f])"

UInt = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Digest = Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$", min_length=71, max_length=71)]
Name = Annotated[str, Meta(pattern=_PRINTABLE, min_length=1, max_length=255)]
Text = Annotated[str, Meta(pattern=_PRINTABLE, max_length=2048)]  # "" when the evidence is absent

Action = Literal["apply", "rollback", "promote"]
Environment = Literal["production", "staging", "lab"]


class InputInvalidError(ValueError):
    """The facts do not fit the schema; nothing may be decided on them."""


class _Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every group of facts: immutable, no unknown and no optional fields."""


class Now(_Fact, frozen=True):
    """Time, read once per decision (agent).

    Attributes:
        unix: seconds since 1970.
        clock: ``synced`` per the kernel's NTP status; ``behind`` when earlier than the newest ledger entry.
    """

    unix: UInt
    clock: Literal["synced", "unsynced", "behind"]


class Request(_Fact, frozen=True):
    """What is asked for (agent).

    Attributes:
        action: ``promote`` ends the watch period and frees the previous generation.
        actor: the authenticated caller (peer credentials or token), not a name it sent.
        environment: the host's own configuration, not the caller's word.
    """

    action: Action
    actor: Name
    environment: Environment


class Patch(_Fact, frozen=True):
    """The signed statement's content, after verification (bundle).

    Attributes:
        manifest_digest: sha256 of the patch file's manifest, recomputed.
        patch_id: unique name of the patch.
        channel: release channel the sequence counts in.
        sequence: grows with every patch of a channel, from 1.
        created_unix: when the statement was made; validity starts here.
        expires_unix: first second at which the patch may no longer be applied.
        author: who wrote the change, from the statement.
        base_digest: build that must be serving before.
        target_digest: build that serves afterwards.
        engine_kind: engine the target build is made for.
        declaration: ``complete`` when the actions computed from both builds touch only declared tensors and files.
    """

    manifest_digest: Digest
    patch_id: Name
    channel: Name
    sequence: UInt
    created_unix: UInt
    expires_unix: UInt
    author: Name
    base_digest: Digest
    target_digest: Digest
    engine_kind: Name
    declaration: Literal["complete", "partial"]


class Signature(_Fact, frozen=True):
    """The patch statement's signature (trust).

    Attributes:
        status: ``verified`` only after the whole pipeline passed in one trust domain.
        subject: whether the signed digest is ``patch.manifest_digest``.
        domain: trust domain whose root verified it ("" when none); ``local`` is the embedded one.
        issuer: OIDC issuer in the certificate ("" when none).
        identity: exact subject alternative name in the certificate ("" when none).
        signed_at_unix: verified signing time, 0 when unknown.
    """

    status: Literal["verified", "failed", "absent"]
    subject: Literal["match", "mismatch", "absent"]
    domain: Text
    issuer: Text
    identity: Text
    signed_at_unix: UInt


class SigningTime(_Fact, frozen=True):
    """A trusted timestamp over the signature (trust): ``invalid`` when one is there but does not verify."""

    status: Literal["verified", "missing", "invalid"]


class Transparency(_Fact, frozen=True):
    """The log's inclusion proof (trust): ``unreachable`` when none is bundled and the log did not answer."""

    status: Literal["included", "missing", "unreachable", "invalid"]


class Ledger(_Fact, frozen=True):
    """What this host has accepted before, from fsynced state (agent).

    Attributes:
        highest_sequence: highest accepted for (channel, target), 0 for none.
        applied_ids: patch ids accepted before, newest first.
    """

    highest_sequence: UInt
    applied_ids: Annotated[tuple[Name, ...], Meta(max_length=APPLIED_IDS_MAX)]


class Target(_Fact, frozen=True):
    """The engine to change, asked just before the decision (agent).

    Attributes:
        engine_kind: as the running build declares it.
        running_digest: digest of the build that serves now.
        name: the host's name for this engine.
        health: from the engine's own report; ``unknown`` when it did not answer.
        memory: whether a second generation fits beside the serving one.
    """

    engine_kind: Name
    running_digest: Digest
    name: Name
    health: Literal["healthy", "unhealthy", "unknown"]
    memory: Literal["sufficient", "short", "unknown"]


class Integrity(_Fact, frozen=True):
    """Bytes on this host (bundle, build store).

    Attributes:
        files: every file of the target build re-hashed equal to its manifest, none missing, none extra.
        atomicity: ``atomic`` when the patch holds every file of the target build that the base lacks, for all ranks.
    """

    files: Literal["match", "mismatch"]
    atomicity: Literal["atomic", "partial"]


class Provenance(_Fact, frozen=True):
    """SLSA provenance of the target build (trust): ``invalid`` covers a wrong builder or source."""

    status: Literal["verified", "missing", "invalid"]


class Qualification(_Fact, frozen=True):
    """Test evidence for (base, target), its limits recomputed here rather than its own "pass" believed (trust)."""

    status: Literal["passed", "failed", "missing", "stale"]


class Rollback(_Fact, frozen=True):
    """The way back (agent, snapshots).

    Attributes:
        known: digests of the builds recorded on this host as verified and once committed.
        target: whether the build a rollback lands on is in ``known`` and re-hashed equal. That build is
            ``patch.base_digest`` for apply and promote, ``patch.target_digest`` for rollback.
        snapshot: state of the memory snapshot of the serving generation.
    """

    known: Annotated[tuple[Digest, ...], Meta(max_length=APPLIED_IDS_MAX)]
    target: Literal["recorded", "unknown"]
    snapshot: Literal["present", "missing", "stale"]


class Memory(_Fact, frozen=True):
    """Verdict on memory before and after the swap (snapshots); ``not_run`` before it."""

    verdict: Literal["commit", "rollback", "hold", "not_run"]


class GateInput(_Fact, frozen=True):
    """Everything a decision may depend on."""

    now: Now
    request: Request
    patch: Patch
    signature: Signature
    signing_time: SigningTime
    transparency: Transparency
    ledger: Ledger
    target: Target
    integrity: Integrity
    provenance: Provenance
    qualification: Qualification
    rollback: Rollback
    memory: Memory


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise InputInvalidError("a JSON object names the same key twice")
    return made


def decode_input(raw: bytes) -> GateInput:
    """Parse facts from JSON, for replay and ``patchctl policy eval``.

    Raises:
        InputInvalidError: not JSON, a repeated key, or not of the schema.
    """
    try:
        facts = _checked(json.loads(raw, object_pairs_hook=_reject_duplicates))
        encode_input(facts)  # a lone surrogate parses but is no text
    except (ValueError, RecursionError) as error:
        raise InputInvalidError(str(error)) from error
    return facts


def _checked(facts: Any) -> GateInput:
    try:
        return msgspec.convert(facts, type=GateInput, strict=True)
    except msgspec.ValidationError as error:
        raise InputInvalidError(str(error)) from error


def encode_input(facts: GateInput) -> bytes:
    """Validate and return the canonical JSON (RFC 8785) that is digested and handed to the engine.

    A struct can be constructed with anything in its fields; this is where it is checked.

    Raises:
        InputInvalidError: a field is missing, of the wrong type or out of range.
    """
    try:
        checked = _checked(msgspec.to_builtins(facts))
        return rfc8785.dumps(msgspec.to_builtins(checked))
    except (TypeError, ValueError, RecursionError) as error:  # lone surrogates and unencodable types
        raise InputInvalidError(str(error)) from error


def input_schema() -> bytes:
    """JSON Schema of the input, as shipped in ``policies/schema/input.json``."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(GateInput), order="deterministic"), indent=2)
