"""Stored and live snapshots, and their differences, as data for people and programs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from snapshots.diff import HostDiff, ProcessDiff, diff
from snapshots.findings import Effect, Finding
from snapshots.model import GenerationState, HostSnapshot, ProcessSnapshot
from snapshots.process_findings import process_findings
from snapshots.store.manifest import Manifest
from snapshots.tensor_findings import resident_findings

# The worst effect first.
_ORDER: tuple[Effect, ...] = ("corruption", "growth", "unknown", "expected", "unchanged")
# What adds to memory, and what takes from it.
_SIGN = {"new": 1, "grown": 1, "gone": -1, "shrunk": -1}


def process_snapshot(process: ProcessSnapshot, *, taken_unix_ns: int) -> HostSnapshot:
    """A snapshot of any process: there is no build, and no tensor has a name."""
    return HostSnapshot(taken_unix_ns, 0, (GenerationState(0, "", {}),), {process.role: process})


def summary(manifest: Manifest) -> dict[str, Any]:
    """One line of a list."""
    snapshot = manifest.snapshot
    return {
        "id": manifest.id,
        "taken_unix_ns": snapshot.taken_unix_ns,
        "label": manifest.label,
        "transaction": manifest.transaction,
        "generation": snapshot.generation,
        "build_digest": snapshot.active.build_digest,
        "pids": {role: process.pid for role, process in snapshot.processes.items()},
        "anonymous_bytes": {role: process.anonymous_bytes for role, process in snapshot.processes.items()},
        "content_bytes": sum(tensor.content.size_bytes for tensor in manifest.contents),
    }


def description(manifest: Manifest) -> dict[str, Any]:
    """Everything about one snapshot but page and chunk digests; regions with the most memory of their own first."""
    stored = {(tensor.generation, tensor.name) for tensor in manifest.contents}
    return {
        **summary(manifest),
        "processes": {role: _process(process) for role, process in manifest.snapshot.processes.items()},
        "generations": [
            {
                "generation": state.generation,
                "build_digest": state.build_digest,
                "tensors": {
                    name: {
                        "dtype": tensor.dtype,
                        "shape": list(tensor.shape),
                        "digest": tensor.digest,
                        "alias": tensor.alias,
                        "restorable": (state.generation, tensor.alias or name) in stored,
                    }
                    for name, tensor in state.tensors.items()
                },
            }
            for state in manifest.snapshot.generations
        ],
    }


def _process(process: ProcessSnapshot) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "start_ticks": process.start_ticks,
        "rss_bytes": process.rss_bytes,
        "anonymous_bytes": process.anonymous_bytes,
        "gaps": msgspec.to_builtins(process.gaps),
        "regions": [
            {
                "label": region.label,
                "rss_bytes": region.rss_bytes,
                "anonymous_bytes": region.anonymous_bytes,
                "method": region.method,
                "confidence": region.confidence,
                "reason": region.reason,
            }
            for region in sorted(process.regions, key=lambda region: (-region.anonymous_bytes, region.start))
        ],
    }


@dataclass(slots=True)
class _Row:
    """All events of the regions of one name in one process."""

    process: str
    region: str
    growth_bytes: int = 0
    changed_bytes: int = 0
    unseen_bytes: int = 0
    confidence: str = "exact"


_WORSE = {"exact": 0, "conservative": 1, "blind": 2}


def difference(before: HostSnapshot, after: HostSnapshot, *, roles: Sequence[str]) -> dict[str, Any]:
    """What differs between two snapshots: findings, the worst first, and regions, the largest growth first.

    Args:
        before: earlier.
        after: later.
        roles: processes that must be covered; with ``engine``, tensors must be too.
    """
    found = diff(before, after)
    findings = [*process_findings(found, tuple(roles), ())]
    if "engine" in roles:
        findings += resident_findings(found)
    return {
        "effect": worst(findings),
        "findings": [
            msgspec.to_builtins(finding)
            for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.effect))
        ],
        "processes": {process.role: _totals(process) for process in found.processes},
        "regions": [msgspec.to_builtins(row) for row in _rows(found)],
        "generations_new": list(found.generations_new),
        "generations_gone": list(found.generations_gone),
    }


def worst(findings: Iterable[Finding]) -> Effect:
    """The effect that weighs most; nothing found is nothing known."""
    return min((finding.effect for finding in findings), key=_ORDER.index, default="unknown")


def _totals(process: ProcessDiff) -> dict[str, Any]:
    return {
        "pid": process.pid_after,
        "replaced": process.replaced,
        "rss_growth_bytes": process.rss_after_bytes - process.rss_before_bytes,
        "anonymous_growth_bytes": process.anonymous_after_bytes - process.anonymous_before_bytes,
    }


def _rows(found: HostDiff) -> list[_Row]:
    rows: dict[tuple[str, str], _Row] = {}
    for process in found.processes:
        for change in process.regions:
            name = change.name or f"[{change.kind}]"
            row = rows.setdefault((process.role, name), _Row(process.role, name))
            if change.event in _SIGN:
                row.growth_bytes += _SIGN[change.event] * change.bytes
            elif change.event == "changed":
                row.changed_bytes += change.bytes
            else:
                row.unseen_bytes += change.bytes
            row.confidence = max(row.confidence, change.confidence, key=_WORSE.__getitem__)
    return sorted(rows.values(), key=lambda row: (-row.growth_bytes, -row.changed_bytes, row.process, row.region))
