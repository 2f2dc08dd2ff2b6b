"""What can go wrong while another process is read."""

from __future__ import annotations


class CaptureError(Exception):
    """The process could not be captured.

    Attributes:
        pid: the process.
        reason: one sentence, the cause.
    """

    def __init__(self, pid: int, reason: str) -> None:
        super().__init__(f"process {pid}: {reason}")
        self.pid = pid
        self.reason = reason


class ProcessGoneError(CaptureError):
    """The process ended, or its pid now belongs to another one."""


class AccessDeniedError(CaptureError):
    """The kernel refused: not the parent, another user, ptrace scope, or not dumpable."""
