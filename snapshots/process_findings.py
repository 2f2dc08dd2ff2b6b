"""What process and region differences mean: blind spots, overwritten code, and the rest in one line. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from snapshots.diff import HostDiff, ProcessDiff
from snapshots.findings import Finding, matches, size_text
from snapshots.region_diff import RegionChange


def process_findings(diff: HostDiff, roles: tuple[str, ...], blind_accepted: tuple[str, ...]) -> Iterator[Finding]:
    """Findings per process: it must be the same one before and after, and everything it has must be seen."""
    compared = {process.role: process for process in diff.processes}
    for role in (*roles, *sorted(compared.keys() - set(roles))):
        process = compared.get(role)
        if process is None:
            yield Finding(
                "unknown",
                f"process {role}",
                "was not captured both before and after",
                action="check that it runs and that this agent may read its memory",
            )
        elif process.replaced:
            yield Finding(
                "unknown",
                f"process {role}",
                "was replaced: what was seen before says nothing about it",
                f"pid {process.pid_before}",
                f"pid {process.pid_after}",
                "find out why it restarted, then deploy again",
            )
        else:
            yield from _region_findings(process, blind_accepted)


def _region_findings(process: ProcessDiff, blind_accepted: tuple[str, ...]) -> Iterator[Finding]:
    blind = [(c.name or c.label, c.label, c.reason) for c in process.regions if _is_blind(c)]
    blind += [(gap.subject, gap.subject, gap.reason) for gap in process.gaps if gap.blind]
    for name, label, reason in blind:
        accepted = matches(name, blind_accepted)
        yield Finding(
            "expected" if accepted else "unknown",
            f"process {process.role}: {label}",
            f"not seen ({reason})" + ("; accepted by this host's limits" if accepted else ""),
            action="" if accepted else "accept it by name in the host's limits, or remove what causes it",
        )
    for change in process.regions:
        if _is_patched_code(change):
            yield Finding(
                "corruption",
                f"process {process.role}: {change.label}",
                f"{change.bytes} bytes of read-only mapped file content were overwritten in memory",
                action="unless a debugger or a uprobe is attached, keep its memory for analysis and restart it",
            )
    yield _memory_summary(process)


def _is_blind(change: RegionChange) -> bool:
    """Unseen content that exists now; what is gone can do no harm."""
    return change.confidence == "blind" and change.event in ("new", "grown", "unseen")


def _is_patched_code(change: RegionChange) -> bool:
    """Code and constants of a mapped file differ though the process could write them at neither time."""
    return change.event == "changed" and change.kind == "file" and not change.writable


def _memory_summary(process: ProcessDiff) -> Finding:
    """Ordinary life of mutable memory, in one line: it is judged by growth per request, not by its size."""
    size_bytes: dict[str, int] = {}
    for change in process.regions:
        size_bytes[change.event] = size_bytes.get(change.event, 0) + change.bytes
    parts = [
        f"{size_text(size_bytes[event])} {event}"
        for event in ("changed", "new", "grown", "shrunk", "gone")
        if event in size_bytes
    ]
    return Finding(
        "expected" if parts else "unchanged",
        f"process {process.role}",
        "mutable memory: " + (", ".join(parts) if parts else "no page was written"),
        f"{size_text(process.anonymous_before_bytes)} anonymous",
        f"{size_text(process.anonymous_after_bytes)} anonymous",
    )
