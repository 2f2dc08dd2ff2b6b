"""Errors of the snapshots package as an operator reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from patchctl.errors import ExitCode, PatchctlError
from snapshots.capture.denial import explain, look
from snapshots.capture.errors import AccessDeniedError, CaptureError
from snapshots.restore import RestoreRefusedError
from snapshots.store.errors import StoreError

_EXIT_CODES = {
    "snapshot.unknown": ExitCode.NOT_FOUND,
    "snapshot.disk_full": ExitCode.HELD,
    "snapshot.quota": ExitCode.HELD,
    "snapshot.tensor_changed": ExitCode.HELD,
    "snapshot.manifest_damaged": ExitCode.SIGNATURE,
    "snapshot.chunk_damaged": ExitCode.SIGNATURE,
    "restore.evidence_only": ExitCode.USAGE,
    "restore.no_such_tensor": ExitCode.NOT_FOUND,
    "restore.not_as_committed": ExitCode.SIGNATURE,
}


@contextmanager
def explained(serving: str) -> Iterator[None]:
    """Turn what the snapshots package raises into a :class:`PatchctlError`; ``serving`` says what goes on."""
    try:
        yield
    except StoreError as error:
        raise PatchctlError(
            code=error.code,
            what=error.what,
            why=error.why,
            exit_code=_EXIT_CODES.get(error.code, ExitCode.INTERNAL),
            serving=serving,
            next_command=error.action,
        ) from error
    except RestoreRefusedError as error:
        raise PatchctlError(
            code=error.code,
            what="nothing was restored",
            why=error.why,
            exit_code=_EXIT_CODES.get(error.code, ExitCode.INCOMPATIBLE),
            serving=serving,
            next_command=error.action,
        ) from error
    except AccessDeniedError as error:
        denial = explain(error.pid, look(error.pid))
        raise PatchctlError(
            code="snapshot.denied",
            what=f"process {error.pid} was not captured",
            why=denial.why,
            exit_code=ExitCode.AUTH,
            serving=serving,
            next_command=denial.action,
        ) from error
    except CaptureError as error:
        raise PatchctlError(
            code="snapshot.failed",
            what=f"process {error.pid} was not captured",
            why=error.reason,
            exit_code=ExitCode.NOT_FOUND,
            serving=serving,
            next_command="patchctl snapshot probe",
        ) from error
