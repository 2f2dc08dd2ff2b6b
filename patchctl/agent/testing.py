"""For tests: a whole engine host on a tiny model, driven through the real command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx

from patchctl.demo.clients import StreamingClients
from patchctl.demo.commands import Result, Shell, stop_host
from patchctl.question import ask

IDENTITY = "release@patchctl.example"
REQUEST_PATH = "request_path.py"
# (weights seed, request path) by version. 1.0.1 keeps the weights, 1.0.2 replaces them.
_VERSIONS = {
    "1.0.0": (1, "request_path_1_0_0.py"),
    "1.0.1": (1, "request_path_1_0_1.py"),
    "1.0.2": (2, "request_path_1_0_1.py"),
}
# The engine takes it and the front refuses it.
UNLOADABLE = "1.0.3"
# Passes every test before it serves; its logits are not finite once a prompt has POISON in it.
POISONED = "1.0.4"
# Odd byte: the golden prompt of the tiny vocabulary has only even ones.
POISON = "%"
_CONTEXT_TOKENS = 256
# A tiny model answers at once: without a pause the clients alone would take both cores.
_PAUSE_S = 0.1


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until ``condition`` holds; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def sockets(pid: int) -> int:
    """Open sockets of a process; other descriptors come and go with its database and thread pool."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += str(descriptor.readlink()).startswith("socket:")
    return count


def children(pid: int, marker: str = "") -> list[int]:
    """Processes that any thread of ``pid`` started, with ``marker`` in their command line."""
    started = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [one for one in started if alive(one) and marker.encode() in Path(f"/proc/{one}/cmdline").read_bytes()]


@dataclass(frozen=True, slots=True)
class HostKit:
    """A home with a trust domain, a policy and three tiny builds; starts hosts and clients on demand."""

    home: Path
    shell: Shell

    def build(self, version: str) -> Path:
        """Folder of a build."""
        return self.home / "builds" / version

    def patch(self, base: str, target: str, *, sequence: int, name: str = "", declare: bool = True) -> Path:
        """A signed patch file from ``base`` to ``target`` (or its folder), declared in full or not at all."""
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

    def fresh(self, home: Path) -> HostKit:
        """The same builds and keys in a home without host state."""
        shutil.copytree(self.home, home, ignore=shutil.ignore_patterns("host"))
        return HostKit(home, Shell(home, None))

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

    def deploy(self, patch: Path, *options: str, expect: int = 0) -> Result:
        """``patchctl deploy``."""
        return self.shell.run("deploy", str(patch), *options, expect=expect)

    def ask(self, url: str = "/v1/status") -> dict[str, Any]:
        """The agent's answer, without starting a command."""
        return ask(Path(self.ready["socket"]), url)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of front and engine."""
        found: dict[str, int] = self.ask()["processes"]
        return found

    def step(self) -> str:
        """The step that the running transaction is at, or ""."""
        identifier = self.ask()["transaction"]
        steps = self.ask(f"/v1/transactions/{identifier}")["steps"] if identifier else []
        return str(steps[-1]["step"]) if steps else ""

    def newest(self) -> dict[str, Any]:
        """The newest transaction of the journal."""
        record: dict[str, Any] = self.ask("/v1/history?limit=1")["transactions"][0]
        return record

    def kill(self, role: str) -> int:
        """Send SIGKILL to ``role``; its process id."""
        pid = self.pids[role]
        os.kill(pid, signal.SIGKILL)
        return pid

    def serves(self, version: str = "") -> bool:
        """Whether requests are answered, by a build of ``version``."""
        try:
            healthy = httpx.get(self.ready["url"] + "/health", timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False
        return healthy and version in ("", self.ask()["active"]["version"])

    def status(self) -> dict[str, Any]:
        """``patchctl status``."""
        data: dict[str, Any] = self.shell.run("status").data
        return data


def make_kit(home: Path, **policy: Any) -> HostKit:
    """Prepare ``home``; ``policy`` is merged into the gate's settings."""
    shell = Shell(home, None)
    for version, (seed, path) in _VERSIONS.items():
        code = files("patchctl.demo.paths").joinpath(path).read_bytes()
        _build(home / "builds" / version, version, seed, code)
    _build(home / "builds" / UNLOADABLE, UNLOADABLE, 1, b"this is no Python\n")
    _build(home / "builds" / POISONED, POISONED, 1, code)
    _poison(home / "builds" / POISONED)
    domain = shell.run("trust", "init", "local").data
    signer = {"domain": "local", "issuer": domain["issuer"], "identity": IDENTITY, "channels": ["stable"]}
    (home / "policy.json").write_text(json.dumps({"identities": [signer], **policy}))
    return HostKit(home, shell)


def _build(folder: Path, version: str, seed: int, request_path: bytes) -> None:
    from engine.build import RuntimeOptions
    from engine.front.testing import tiny_tokenizer_files
    from engine.testing import tiny_build

    tiny_build(
        folder,
        seed=seed,
        version=version,
        config=_config(),
        request_path=REQUEST_PATH,
        extra_files={**tiny_tokenizer_files(), REQUEST_PATH: request_path},
        runtime=RuntimeOptions(batch_sizes=(1, 2), contexts=(_CONTEXT_TOKENS,)),
    )


def _poison(folder: Path) -> None:
    """Replace the weights of a build by those that one token spoils."""
    from safetensors.torch import save_file

    from engine.front.testing import byte_token
    from engine.testing import random_weights

    weights = random_weights(_config(), seed=1)
    poison = byte_token(ord(POISON))
    weights["model.embed_tokens.weight"][poison] = float("inf")
    weights["lm_head.weight"][poison] = 0  # no answer goes through it by itself
    save_file(weights, folder / "model.safetensors")
    reseal(folder, version=POISONED)


def reseal(folder: Path, *, version: str) -> None:
    """Make a build of a folder that was changed."""
    from engine.build import read_manifest, seal_build

    old = read_manifest(folder)
    seal_build(
        folder,
        name=old.name,
        version=version,
        model=old.model,
        request_path=old.request_path,
        runtime=old.runtime,
    )


def _config() -> dict[str, Any]:
    """Input and output embedding apart: poison in one does not reach the other."""
    from engine.front.testing import TINY_VOCABULARY
    from engine.testing import tiny_config

    return tiny_config(vocab=TINY_VOCABULARY, tied=False)
