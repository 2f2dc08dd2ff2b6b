"""vLLM's own server as a peer: started as its users start it, changed through its own routes.

Environment and options are the ones under which its CPU build runs on two cores; its development routes
(pause, resume, collective calls, sleep) are off unless ``VLLM_SERVER_DEV_MODE`` is set.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

# It compiles nothing (eager), yet importing and profiling take a good half minute on two cores.
_START_S_MAX = 300.0
_STOP_S_MAX = 30.0
_CALL_S_MAX = 120.0
MODEL_NAME = "smollm2"
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Binding threads to cores fails in containers that hide the topology.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_OPTIONS = (
    *("--host", "127.0.0.1", "--enforce-eager", "--dtype", "bfloat16"),
    *("--max-model-len", "1024", "--max-num-seqs", "4", "--served-model-name", MODEL_NAME),
)


class RouteRefusedError(RuntimeError):
    """A route answered with an error: this build does not offer it."""


def find_vllm(command: str) -> Path | None:
    """Absolute path of the vllm command, or None when there is none."""
    found = shutil.which(command)
    return None if found is None else Path(found).absolute()


class VllmServer:
    """Serves ``model`` on loopback until the block ends."""

    def __init__(self, command: Path, model: Path, log: Path) -> None:
        # The port is free when we look; vLLM binds it half a minute later, on loopback, in our own run.
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # Its helpers are found beside it, and it must not see the packages of this environment.
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        environment |= {**_ENVIRONMENT, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [str(command), "serve", str(model), "--port", str(port), *_OPTIONS],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # Its engine core is a child: the whole group is ended together.
                start_new_session=True,
            )
        self._http = httpx.Client(base_url=self.url, timeout=_CALL_S_MAX, trust_env=False)

    def __enter__(self) -> Self:
        try:
            self._wait_until_healthy()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def call(self, path: str, body: dict[str, Any] | None = None) -> None:
        """POST to a route.

        Raises:
            RouteRefusedError: it answered with an error.
        """
        reply = self._http.post(path, json=body)
        if reply.is_error:
            raise RouteRefusedError(f"{path}: HTTP {reply.status_code} {reply.text[:200]}")

    def reload(self, folder: Path) -> None:
        """Load the weights of ``folder`` into the live model, layer by layer, while it serves."""
        self.call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def _wait_until_healthy(self) -> None:
        give_up = time.monotonic() + _START_S_MAX
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                if self._http.get("/health", timeout=1.0).is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"vllm did not start; its log ends with:\n{tail}")

    def _close(self) -> None:
        self._http.close()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sign)
                self._process.wait(_STOP_S_MAX)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
