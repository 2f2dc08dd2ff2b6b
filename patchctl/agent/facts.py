"""Gathers the gate's input from what this host verified, recorded or measured itself."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Literal

from engine.build import read_manifest
from patchctl.admission.facts import (
    GateInput,
    Integrity,
    Ledger,
    Memory,
    Now,
    Patch,
    Provenance,
    Qualification,
    Request,
    Rollback,
    Signature,
    SigningTime,
    Target,
    Transparency,
)
from patchctl.agent.context import HostContext, unix_now
from patchctl.agent.evidence import generation_file
from patchctl.bundle.declaration import undeclared
from patchctl.bundle.read import PatchFile
from patchctl.errors import PatchctlError
from patchctl.journal.record import GenerationRecord
from patchctl.trust.verify import VerifiedStatement

# adjtimex(2) returns TIME_ERROR while the kernel clock is not synchronised.
_TIME_ERROR = 5
_TIMEX_BYTES = 208
# Graphs, KV and workspace of a second generation, beside its weights.
_STAGE_OVERHEAD_BYTES = 512 << 20

# Older replays fail on the sequence already.
_HISTORY_MAX = 1000

Clock = Literal["synced", "unsynced", "behind"]
MemoryVerdict = Literal["commit", "rollback", "hold", "not_run"]
Action = Literal["apply", "promote"]


def gather(
    context: HostContext,
    *,
    action: Action,
    actor: str,
    patch: PatchFile,
    statement: VerifiedStatement,
    serving: GenerationRecord,
    highest_sequence: int,
    memory: MemoryVerdict = "not_run",
) -> GateInput:
    """The facts of one decision on a patch whose signature and digests were verified before.

    ``serving`` is the committed generation. On ``promote`` the target runs already, on probation.
    """
    config = patch.config
    recorded = _recorded_builds(context)
    return GateInput(
        now=Now(unix=unix_now(), clock=clock_status(_newest_entry_unix(context))),
        request=Request(action=action, actor=actor, environment=context.settings.environment),
        patch=Patch(
            manifest_digest=f"sha256:{patch.manifest_digest}",
            patch_id=config.patch_id,
            channel=config.channel,
            sequence=config.sequence,
            created_unix=config.created_unix,
            expires_unix=config.expires_unix,
            author=config.author,
            base_digest=config.base_digest,
            target_digest=config.target_digest,
            engine_kind=config.engine_kind,
            declaration=undeclared(config).coverage,
        ),
        signature=Signature(
            status="verified",
            subject="match",
            domain=statement.domain,
            issuer=statement.issuer,
            identity=statement.identity,
            signed_at_unix=statement.signed_at_unix,
        ),
        signing_time=SigningTime(status="verified"),
        transparency=Transparency(status=statement.log_status),
        ledger=Ledger(highest_sequence=highest_sequence, applied_ids=_applied_ids(context)),
        target=Target(
            engine_kind=read_manifest(context.store.path(serving.digest)).engine_kind,
            running_digest=config.target_digest if action == "promote" else serving.digest,
            name=context.settings.target,
            health=_health(context),
            memory=_memory(sum(entry.size_bytes for entry in config.target_manifest.weight_files)),
        ),
        integrity=Integrity(files="match", atomicity="atomic"),
        provenance=Provenance(status="missing"),
        qualification=Qualification(status="missing"),
        rollback=Rollback(
            known=recorded,
            target="recorded" if config.base_digest in recorded else "unknown",
            snapshot="present" if generation_file(context, serving.number).exists() else "missing",
        ),
        memory=Memory(verdict=memory),
    )


def clock_status(newest_entry_unix: int) -> Clock:
    """The kernel's own view of its clock, and whether time ran backwards since the newest ledger entry."""
    if unix_now() < newest_entry_unix:
        return "behind"
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return "unsynced" if state in (_TIME_ERROR, -1) else "synced"


def _recorded_builds(context: HostContext) -> tuple[str, ...]:
    digests = dict.fromkeys(
        entry.digest for entry in reversed(context.journal.generations()) if entry.committed_unix_ns is not None
    )
    return tuple(digest for digest in digests if context.store.has(digest))


def _applied_ids(context: HostContext) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            record.patch_id
            for record in context.journal.history(_HISTORY_MAX)
            if record.state == "committed" and record.patch_id
        )
    )


def _newest_entry_unix(context: HostContext) -> int:
    ended = [
        record.ended_unix_ns for record in context.journal.history(_HISTORY_MAX) if record.ended_unix_ns is not None
    ]
    return max(ended, default=0) // 10**9


def _health(context: HostContext) -> Literal["healthy", "unhealthy", "unknown"]:
    try:
        spoiled = context.host.nonfinite_rows()
    except PatchctlError:
        return "unknown"
    return "unhealthy" if spoiled else "healthy"


def _memory(weight_bytes: int) -> Literal["sufficient", "short", "unknown"]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return "unknown"
    return "sufficient" if available_kib * 1024 >= weight_bytes + _STAGE_OVERHEAD_BYTES else "short"
