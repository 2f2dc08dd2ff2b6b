"""For tests: a whole engine host on a tiny model, driven through the real command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from patchctl.demo.clients import StreamingClients
from patchctl.demo.commands import Result, Shell, stop_host

IDENTITY = "release@patchctl.example"
REQUEST_PATH = "request_path.py"
# (weights seed, request path of the demo) by version: 1.0.1 keeps the weights, 1.0.2 replaces them.
_VERSIONS = {"1.0.0": (1, "1_0_0"), "1.0.1": (1, "1_0_1"), "1.0.2": (2, "1_0_1")}
_CONTEXT_TOKENS = 256
# A tiny model answers at once: without a pause the clients alone would take both cores.
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class HostKit:
    """A home with a trust domain, a policy and three tiny builds; starts hosts and clients on demand."""

    home: Path
    shell: Shell

    def build(self, version: str) -> Path:
        """Folder of a build."""
        return self.home / "builds" / version

    def patch(self, base: str, target: str, *, sequence: int, name: str = "", declare: bool = True) -> Path:
        """A signed patch file from ``base`` to ``target``, declared in full or not at all."""
        out = self.home / f"{name or target}.patch"
        declared = [
            "--declare-file",
            REQUEST_PATH,
            "--declare-file",
            "model.safetensors",
            "--declare-tensor",
            "*",
            "--growth-max",
            "65536",
        ]
        self.shell.run(
            "build",
            str(self.build(base)),
            str(self.build(target)),
            "--out",
            str(out),
            "--sequence",
            str(sequence),
            *(declared if declare else []),
        )
        self.shell.run("sign", str(out), "--identity", IDENTITY)
        return out

    @contextmanager
    def host(self, *arguments: str, **environment: str) -> Iterator[RunningHost]:
        """A host that serves 1.0.0, or what its journal says."""
        shell = Shell(self.home, None, environment)
        process, ready = shell.start_host(
            *("--build", str(self.build("1.0.0")), "--listen", "127.0.0.1:0", "--environment", "lab"),
            *("--policy-data", str(self.home / "policy.json"), "--bake-s", "4"),
            *arguments,
        )
        try:
            yield RunningHost(process, ready, self.shell)
        finally:
            stop_host(process)


@dataclass(frozen=True, slots=True)
class RunningHost:
    """A host process, what it said when it was ready, and a shell to talk to it."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    shell: Shell

    @contextmanager
    def traffic(self, count: int = 2) -> Iterator[StreamingClients]:
        """Clients that stream until the block ends."""
        clients = StreamingClients(self.ready["url"], "tiny-llama", count, pause_s=_PAUSE_S)
        clients.start()
        try:
            yield clients
        finally:
            clients.stop()

    def deploy(self, patch: Path, *, expect: int = 0) -> Result:
        """``patchctl deploy``."""
        return self.shell.run("deploy", str(patch), expect=expect)

    def status(self) -> dict[str, Any]:
        """``patchctl status``."""
        data: dict[str, Any] = self.shell.run("status").data
        return data


def make_kit(home: Path, **policy: Any) -> HostKit:
    """Prepare ``home``; ``policy`` is merged into the gate's settings."""
    from engine.build import RuntimeOptions
    from engine.front.testing import TINY_VOCABULARY, tiny_tokenizer_files
    from engine.testing import tiny_build

    shell = Shell(home, None)
    for version, (seed, path) in _VERSIONS.items():
        code = files("patchctl.demo.paths").joinpath(f"request_path_{path}.py").read_bytes()
        tiny_build(
            home / "builds" / version,
            seed=seed,
            version=version,
            vocab=TINY_VOCABULARY,
            request_path=REQUEST_PATH,
            extra_files={**tiny_tokenizer_files(), REQUEST_PATH: code},
            runtime=RuntimeOptions(batch_sizes=(1, 2), contexts=(_CONTEXT_TOKENS,)),
        )
    domain = shell.run("trust", "init", "local").data
    signer = {"domain": "local", "issuer": domain["issuer"], "identity": IDENTITY, "channels": ["stable"]}
    (home / "policy.json").write_text(json.dumps({"identities": [signer], **policy}))
    return HostKit(home, shell)
