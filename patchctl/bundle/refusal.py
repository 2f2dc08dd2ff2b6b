"""Refusals of the patch file, each with one stable code."""

from __future__ import annotations

from patchctl.errors import ExitCode, PatchctlError


def damaged(why: str) -> PatchctlError:
    """The file is not, byte for byte, what ``patchctl build`` writes, or contradicts itself."""
    return PatchctlError(
        code="patch.damaged",
        what="The patch file was refused; nothing was written.",
        why=why,
        exit_code=ExitCode.SIGNATURE,
    )


def unsupported(why: str) -> PatchctlError:
    """The file is sound but of a format this version does not know."""
    return PatchctlError(
        code="patch.unsupported",
        what="The patch file needs another patchctl version; nothing was written.",
        why=why,
        exit_code=ExitCode.INCOMPATIBLE,
    )


def wrong_base(needed: str, found: str) -> PatchctlError:
    """The patch starts from another build than the one it was given."""
    return PatchctlError(
        code="patch.wrong_base",
        what="The patch does not apply to this build; nothing was written.",
        why=f"the patch needs base {needed}, this build is {found}",
        exit_code=ExitCode.INCOMPATIBLE,
    )
