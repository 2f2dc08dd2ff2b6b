"""Runs patchctl's own command line, exactly as an operator would, and reads its JSON."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from patchctl.errors import PatchctlError

# Longer than any step of the demo; a hang ends in an explained error instead of a silent wait.
_COMMAND_S_MAX = 180.0
_STOP_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left: exit code, data from stdout, error from stderr (None on success), wall time."""

    exit_code: int
    data: Any
    error: dict[str, Any] | None
    took_ms: float


class Shell:
    """Runs ``patchctl …`` in one home.

    Attributes:
        log: every command is echoed here before it runs; None keeps quiet.
        extra: environment variables beside the caller's own.
    """

    def __init__(self, home: Path, log: IO[str] | None, extra: Mapping[str, str] | None = None) -> None:
        self._home = home
        self._environment = {**os.environ, **(extra or {}), "PATCHCTL_HOME": str(home)}
        self._log = log

    def run(self, *arguments: str, expect: int = 0) -> Result:
        """Run one command with ``-o json`` and check its exit code.

        Raises:
            PatchctlError: ``demo.unexpected`` when it ends otherwise than the story says.
        """
        self._echo(arguments)
        started_s = time.perf_counter()
        done = subprocess.run(
            self._argv(*arguments, "-o", "json"),
            cwd=self._home,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S_MAX,
            check=False,
        )
        took_ms = round((time.perf_counter() - started_s) * 1e3, 1)
        data = json.loads(done.stdout) if done.stdout.strip() else None
        error = _error_in(done.stderr)
        if done.returncode != expect:
            why = error["why"] if error else done.stderr.strip()[-500:] or "it said nothing"
            raise PatchctlError(
                code="demo.unexpected",
                what=f"patchctl {arguments[0]} ended with {done.returncode}, the demo expects {expect}",
                why=why,
                next_command="patchctl demo --keep, then look into the home it names",
            )
        return Result(done.returncode, data, error, took_ms)

    def start_host(self, *arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start ``patchctl engine serve`` and wait until it serves.

        Raises:
            PatchctlError: the host's own error.
        """
        self._echo(("engine", "serve", *arguments))
        host = subprocess.Popen(
            self._argv("engine", "serve", *arguments, "-o", "json"),
            cwd=self._home,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C must reach the demo alone: it then stops the host in order.
            process_group=0,
        )
        assert host.stdout is not None  # noqa: S101 - PIPE above
        line = host.stdout.readline()
        if line:
            ready: dict[str, Any] = json.loads(line)
            return host, ready
        _, stderr = host.communicate(timeout=_STOP_S_MAX)
        error = _error_in(stderr)
        if error is not None:
            raise PatchctlError(**error)
        raise PatchctlError(
            code="demo.host_failed",
            what="the engine host did not start",
            why=stderr.strip()[-500:] or f"it ended with {host.returncode}",
            next_command="PATCHCTL_DEBUG=1 patchctl demo --keep",
        )

    def _argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "patchctl", *arguments]

    def _echo(self, arguments: tuple[str, ...]) -> None:
        if self._log is not None:
            # The working folder is the home, so its name may be left out.
            text = shlex.join(arguments).replace(f"{self._home}/", "")
            print(f"  $ patchctl {text}", file=self._log, flush=True)


def stop_host(host: subprocess.Popen[str]) -> None:
    """End the host in order, by force only if it does not listen."""
    if host.poll() is None:
        host.terminate()
    try:
        host.communicate(timeout=_STOP_S_MAX)
    except subprocess.TimeoutExpired:
        host.kill()
        host.communicate()


def _error_in(stderr: str) -> dict[str, Any] | None:
    for line in reversed(stderr.splitlines()):
        if line.startswith('{"error"'):
            error: dict[str, Any] = json.loads(line)["error"]
            return error
    return None
