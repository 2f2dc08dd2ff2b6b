"""How this package says no: every failure becomes one explained error, whatever library raised it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from patchctl.errors import ExitCode, PatchctlError

# Library messages can quote the input; this much identifies the cause without flooding a terminal.
_CAUSE_CHARS_MAX = 240


def refusal(
    code: str, what: str, why: str, *, next_command: str = "", exit_code: ExitCode = ExitCode.SIGNATURE
) -> PatchctlError:
    """The error to raise: ``code`` is ``trust.<reason>``, stable; ``why`` may quote library text."""
    return PatchctlError(code=f"trust.{code}", what=what, why=why, exit_code=exit_code, next_command=next_command)


def printable(text: str) -> str:
    """``text`` as one short line fit for a terminal: it can hold attacker-chosen bytes, escape codes among them."""
    line = "".join(char if char.isprintable() else " " for char in text[:_CAUSE_CHARS_MAX])
    return line if len(text) <= _CAUSE_CHARS_MAX else line + "..."


def cause(error: BaseException) -> str:
    """One line about ``error``."""
    return printable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


@contextmanager
def fail_closed(code: str, what: str, *, next_command: str = "") -> Iterator[None]:
    """Turn anything raised inside into a refusal; refusals pass unchanged.

    2 % of the refusals of fuzzed bundles are ValueError, binascii or pydantic errors rather than sigstore's
    own, and a panic in a Rust extension derives from BaseException: all of them mean "not verified".

    Raises:
        PatchctlError: ``trust.<code>``.
    """
    try:
        yield
    except PatchctlError:
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise refusal(code, what, cause(error), next_command=next_command) from error
