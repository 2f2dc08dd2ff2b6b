"""The stager: a niced, short-lived child that unpacks a patch and golden-tests the result.

It hashes, writes and computes at the lowest priority, so that serving keeps its core; the engine
process then only maps what the stager left. Its answer is one JSON object on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.lifetime import die_with_parent
from patchctl.errors import ExitCode, PatchctlError

# sched(7): about a tenth of a contended core against nice 0. At 19 it is 1.5 %, and a saturated host
# never finished staging (measured: 54 s instead of 8).
_NICE = 10
# Hashing and copying 2 GB and a torch import on a contended core.
_STAGER_S_MAX = 600.0


def stage_in_child(patch_fd: int, base: Path, store: Path) -> dict[str, Any]:
    """Apply the open patch file in a niced child.

    Returns:
        ``folder`` of the new build and its ``golden`` tokens.

    Raises:
        PatchctlError: the child's own refusal, or ``stage.crashed`` when it died.
    """
    command = [sys.executable, "-P", "-m", __name__, str(patch_fd), str(base), str(store)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        pass_fds=[patch_fd],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    ) as child:
        try:
            out, err = child.communicate(timeout=_STAGER_S_MAX)
        except BaseException:
            child.kill()
            raise
    try:
        answer: dict[str, Any] = json.loads(out)
    except ValueError as error:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise PatchctlError(
            code="stage.crashed",
            what="the build was not staged",
            why=f"the stager ended with status {child.returncode}: {last or 'no message'}",
            serving="the active generation, untouched",
            next_command="patchctl deploy … again",
        ) from error
    if "error" in answer:
        raise PatchctlError(**{**answer["error"], "exit_code": ExitCode(answer["error"]["exit_code"])})
    return answer


def _stage(patch_fd: int, base: Path, store: Path) -> dict[str, Any]:
    from engine.golden import golden_tokens
    from patchctl.bundle.apply import apply
    from patchctl.bundle.read import PatchFile
    from patchctl.store import BuildStore

    with PatchFile.open(patch_fd) as patch:
        folder = apply(patch, base, BuildStore(store))
    return {"folder": str(folder), "golden": golden_tokens(folder)}


def _main() -> None:
    die_with_parent()
    os.nice(_NICE)
    patch_fd, base, store = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    try:
        answer = _stage(patch_fd, base, store)
    except PatchctlError as error:
        answer = {"error": error.as_dict()}
    except Exception as error:
        # Whatever a hostile build makes us raise is a refusal with its words, never a traceback.
        refusal = PatchctlError(
            code="stage.failed",
            what="the build was not staged",
            why=f"{type(error).__name__}: {error}",
            exit_code=ExitCode.INCOMPATIBLE,
            serving="the active generation, untouched",
            next_command="patchctl inspect FILE",
        )
        answer = {"error": refusal.as_dict()}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
