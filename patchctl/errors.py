"""The one error type that reaches an operator, and the exit codes it maps to.

Every refusal names a stable code, what happened, why, what still serves, and the next command: an
operator at 3 a.m. must not have to guess whether traffic is safe.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ExitCode(enum.IntEnum):
    """Process exit codes; CI jobs branch on them, so their meaning never changes."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    NOT_FOUND = 3
    AUTH = 4
    SIGNATURE = 5
    POLICY_DENIED = 6
    FENCED = 7
    HELD = 8
    HALTED = 9
    ROLLED_BACK = 10
    ROLLBACK_INCOMPLETE = 11
    TIMEOUT = 12
    UNREACHABLE = 13
    INCOMPATIBLE = 14
    PLAN_HAS_CHANGES = 20
    INTERRUPTED = 130


@dataclass(eq=False, slots=True)
class PatchctlError(Exception):
    """A refusal or failure, explained.

    Attributes:
        code: stable dotted identifier, e.g. ``trust.signature_invalid``; scripts match on it.
        what: one sentence, what did not happen.
        why: one sentence, the cause as far as it is known.
        exit_code: the process exit status.
        serving: what is still serving, or "" when the question does not arise (no host involved).
        next_command: the exact command to run next, or "".
    """

    code: str
    what: str
    why: str
    exit_code: ExitCode = ExitCode.INTERNAL
    serving: str = ""
    next_command: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.what} ({self.why})"

    def as_dict(self) -> dict[str, str | int]:
        """The error as data, for ``-o json`` and the agent API."""
        return {
            "code": self.code,
            "what": self.what,
            "why": self.why,
            "exit_code": int(self.exit_code),
            "serving": self.serving,
            "next_command": self.next_command,
        }
