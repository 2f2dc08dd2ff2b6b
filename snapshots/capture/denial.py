"""Why the kernel does not let this process read another one, and what to do about it.

The rules are those of ptrace access mode PTRACE_MODE_ATTACH_REALCREDS (ptrace(2), "Ptrace access mode checking") and
of Yama (kernel documentation, admin-guide/LSM/Yama).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CAP_SYS_PTRACE = 19
_SCOPE_PARENT, _SCOPE_ADMIN, _SCOPE_NOBODY = 1, 2, 3


@dataclass(frozen=True, slots=True)
class AccessFacts:
    """What decides whether memory may be read.

    Attributes:
        uid: effective user of this process.
        target_uids: real, effective and saved user of the other; None when even that is hidden.
        ptrace_scope: Yama's setting; 0 where there is no Yama.
        capable: this process has CAP_SYS_PTRACE.
    """

    uid: int
    target_uids: frozenset[int] | None
    ptrace_scope: int
    capable: bool


@dataclass(frozen=True, slots=True)
class Denial:
    """``why`` in one sentence; ``action`` is what to run instead."""

    why: str
    action: str


def explain(pid: int, facts: AccessFacts) -> Denial:
    """The first rule that stands in the way, in the kernel's order."""
    scope, owners = facts.ptrace_scope, facts.target_uids or frozenset()
    owner = min(owners - {facts.uid}, default=facts.uid)
    rules = (
        (
            facts.target_uids is None,
            f"process {pid} is hidden from uid {facts.uid} (hidepid, or another pid namespace)",
            _as("root"),
        ),
        (
            not facts.capable and owner != facts.uid,
            f"process {pid} belongs to uid {owner}; this is uid {facts.uid} without CAP_SYS_PTRACE",
            _as(f"'#{owner}'" if scope == 0 else "root"),
        ),
        (
            scope >= _SCOPE_NOBODY,
            f"ptrace_scope is {scope}: nobody may read another process",
            "reboot with another kernel.yama.ptrace_scope: it cannot be lowered before",
        ),
        (
            not facts.capable and scope == _SCOPE_ADMIN,
            "ptrace_scope is 2: only CAP_SYS_PTRACE may read another process",
            _as("root"),
        ),
        (
            not facts.capable and scope == _SCOPE_PARENT,
            "ptrace_scope is 1: only a parent, or CAP_SYS_PTRACE, may read another process",
            f"{_as('root')}, or sysctl kernel.yama.ptrace_scope=0",
        ),
        (
            not facts.capable,
            f"process {pid} is not dumpable (it changed its user, or asked not to be read)",
            _as("root"),
        ),
        (
            True,
            f"refused despite CAP_SYS_PTRACE: process {pid} is in another user namespace, or a security module denies",
            "run patchctl in the namespace of the process, or in a container with --cap-add SYS_PTRACE",
        ),
    )
    return next(Denial(why, action) for applies, why, action in rules if applies)


def look(pid: int) -> AccessFacts:
    """The facts as they are now; what cannot be read counts as absent."""
    status = _status("self")
    target = _status(str(pid))
    capabilities = int(status.get("CapEff", "0"), 16)
    return AccessFacts(
        uid=os.geteuid(),
        target_uids=frozenset(map(int, target["Uid"].split()[:3])) if "Uid" in target else None,
        ptrace_scope=_ptrace_scope(),
        capable=bool(capabilities >> _CAP_SYS_PTRACE & 1),
    )


def _status(name: str) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{name}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _ptrace_scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _as(user: str) -> str:
    return f"sudo -u {user} patchctl snapshot …"
