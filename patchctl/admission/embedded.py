"""The embedded Rego engine: regorus in a child process with CPU, memory and time limits.

Native code that parses what others wrote does not run inside the process that swaps engines. The child
stays warm between decisions; after anything but a clean result it is killed and the next call starts another.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from patchctl.admission.engine import ENTRYPOINT, EngineError, Evaluation
from patchctl.admission.policy import PolicySet
from patchctl.admission.worker import HEADER

_DISTRIBUTION = "gordon-to-regorus"
# What the child needs to find the same packages; secrets in the environment stay out of it.
_ENVIRONMENT_KEPT = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of one request. A decision takes under 10 ms of CPU and 40 MiB; these bound the hostile case.

    Attributes:
        wall_s: until the child is killed; generous, because a loaded host must not deny by accident.
        cpu_s: CPU time, enforced by the kernel.
        memory_bytes: address space, enforced by the kernel.
        reply_bytes_max: a decision has a few KiB.
    """

    wall_s: float = 10.0
    cpu_s: int = 2
    memory_bytes: int = 512 << 20
    reply_bytes_max: int = 4 << 20


class _Worker:
    """One child process and the socket to it."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self.loaded = ""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # the current folder is not trusted to hold modules
                    "-m",
                    "patchctl.admission.worker",
                    str(theirs.fileno()),
                    str(limits.memory_bytes),
                    str(limits.cpu_s),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={name: os.environ[name] for name in _ENVIRONMENT_KEPT if name in os.environ},
            )
        self._channel = ours
        self.end = weakref.finalize(self, _end, self._process, ours)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request and read its reply, within the wall limit.

        Raises:
            EngineError: crashed, timed out, or reported an error.
        """
        deadline = time.monotonic() + self._limits.wall_s
        raw = json.dumps(body).encode()
        try:
            self._channel.settimeout(self._limits.wall_s)
            self._channel.sendall(HEADER.pack(len(raw)) + raw)
            (count,) = HEADER.unpack(self._receive(HEADER.size, deadline))
            if count > self._limits.reply_bytes_max:
                raise EngineError("gate.result_malformed", f"the policy worker's reply has {count} bytes")
            reply = json.loads(self._receive(count, deadline))
        except TimeoutError as error:
            raise EngineError("gate.engine_timeout", f"no answer within {self._limits.wall_s} s") from error
        except OSError as error:
            raise self._crashed() from error
        if not isinstance(reply, dict):
            raise EngineError("gate.result_malformed", "the policy worker's reply is not an object")
        if "error" in reply:
            raise EngineError(str(reply["error"]), str(reply.get("why", "")))
        return reply

    def _receive(self, count: int, deadline: float) -> bytes:
        raw = bytearray()
        while len(raw) < count:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            self._channel.settimeout(remaining_s)
            part = self._channel.recv(count - len(raw))
            if not part:
                raise ConnectionResetError
            raw += part
        return bytes(raw)

    def _crashed(self) -> EngineError:
        try:
            status = self._process.wait(timeout=self._limits.wall_s)
        except subprocess.TimeoutExpired:
            return EngineError("gate.engine_crashed", "the policy worker closed its socket")
        if status == -signal.SIGXCPU:
            return EngineError("gate.engine_timeout", f"the policy used more than {self._limits.cpu_s} s of CPU")
        cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return EngineError("gate.engine_crashed", f"the policy worker ended: {cause}")


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()


@cache
def _engine_version() -> str:
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError as error:
        raise EngineError(
            "gate.engine_missing",
            f"{_DISTRIBUTION} is not installed (it has no wheel for this platform): start an OPA server on this host "
            "and set PATCHCTL_OPA_URL",
        ) from error


class EmbeddedEngine:
    """A :class:`PolicyEngine` without a server. Thread-safe: one evaluation at a time."""

    name = "embedded"

    def __init__(self, limits: WorkerLimits | None = None) -> None:
        self._limits = limits or WorkerLimits()
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    def evaluate(self, policy: PolicySet, document: bytes, query: str = ENTRYPOINT) -> Evaluation:
        """See :class:`PolicyEngine`.

        Raises:
            EngineError: no defined result; the child was replaced.
        """
        engine_version = _engine_version()
        with self._lock:
            worker = self._worker = self._worker or _Worker(self._limits)
            try:
                if worker.loaded != policy.revision:
                    worker.request(
                        {
                            "op": "load",
                            "modules": [[module.name, module.source] for module in policy.modules],
                            "data": policy.data_json.decode(),
                        },
                    )
                    worker.loaded = policy.revision
                reply = worker.request({"op": "eval", "input": document.decode(), "query": query})
            except BaseException:  # whatever it was, this child answers nobody again
                self._discard()
                raise
        return Evaluation(reply.get("value"), engine_version)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._discard()

    def _discard(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None
