"""Commands against a running engine host: deploy, status, history, rollback."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchctl.commands.options import CommitMode, HomeOption, HostOption, OutputOption, SwapPolicy
from patchctl.errors import ExitCode, PatchctlError
from patchctl.home import Home
from patchctl.question import ask
from patchctl.render.output import Output, human_bytes, print_json, print_pairs, print_table, short_digest
from patchctl.render.progress import StepPrinter

if TYPE_CHECKING:
    from patchctl.client import AgentClient

ATTESTATION_SUFFIX = ".sigstore.jsonl"


def _client(host: Path | None, home: Path | None) -> AgentClient:
    from patchctl.client import AgentClient

    return AgentClient(host or Home.resolve(home).socket)


def deploy(
    patch: Annotated[Path, typer.Argument(help="The patch file.")],
    attestations: Annotated[
        Path | None, typer.Option(help="Its signatures.", show_default=f"PATCH{ATTESTATION_SUFFIX}")
    ] = None,
    policy: Annotated[
        SwapPolicy, typer.Option(help="What running sequences keep at the swap: carry KV, recompute it, or drain.")
    ] = SwapPolicy.AUTO,
    commit_mode: Annotated[
        CommitMode, typer.Option(help="Exchange graphs, or copy weights into those that serve.")
    ] = CommitMode.AUTO,
    hard_stop_after_s: Annotated[
        float | None,
        typer.Option(min=0, max=3600, help="End responses a drain still waits for after this.", show_default="never"),
    ] = None,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run one host transaction: verify, gate, stage, swap, bake, judge, commit or roll back."""
    beside = patch.with_name(patch.name + ATTESTATION_SUFFIX)
    swap = {"policy": policy, "commit_mode": commit_mode, "hard_stop_after_s": hard_stop_after_s}
    with _client(host, home) as client:
        _follow(client.deploy(patch, attestations or beside, swap), output)


def rollback(
    to: Annotated[
        int | None, typer.Option(help="Generation to return to.", show_default="the build committed before this one")
    ] = None,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Return to a recorded build. Needs nothing but the host; instant while it is resident."""
    with _client(host, home) as client:
        _follow(client.rollback(to), output)


def status(host: HostOption = None, home: HomeOption = None, output: OutputOption = Output.TABLE) -> None:
    """What serves, what is resident, what runs."""
    data = ask(host or Home.resolve(home).socket, "/v1/status")
    if output is Output.JSON:
        print_json(data)
        return
    print_pairs(
        [
            ("active", _active_line(data["active"])),
            ("api", data["url"]),
            ("transaction", data["transaction"] or "none running"),
            ("requests", ", ".join(f"{n} {name}" for name, n in data["requests"].items()) or "restarting"),
            ("restarts", ", ".join(f"{role} {count}" for role, count in data["restarts"].items())),
            ("memory", ", ".join(f"{role} {human_bytes(size)}" for role, size in data["memory_bytes"].items())),
            ("agent", f"pid {data['agent']['pid']}, {data['agent']['version']}"),
        ]
    )
    print()
    print_table(
        ["GENERATION", "VERSION", "STATE", "BUILD"],
        [(g["number"], g["version"], g["state"], short_digest(g["digest"])) for g in data["generations"]],
    )


def _active_line(active: dict[str, Any] | None) -> str:
    if active is None:
        return "nothing yet"
    return f"{active['version']}  generation {active['generation']}  {short_digest(active['digest'])}"


def history(
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """The host's transactions, newest first."""
    records = ask(host or Home.resolve(home).socket, f"/v1/history?limit={limit}")["transactions"]
    if output is Output.JSON:
        print_json(records)
        return
    print_table(
        ["TRANSACTION", "STARTED (UTC)", "KIND", "PATCH", "STATE", "WHY"],
        [
            (
                record["id"],
                datetime.fromtimestamp(record["started_unix_ns"] / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S"),
                record["kind"],
                record["patch_id"] or "-",
                record["state"],
                (record["error"] or {}).get("code", ""),
            )
            for record in records
        ],
    )


def _follow(events: Iterator[dict[str, Any]], output: Output) -> None:
    """Show a transaction to its end and leave with its exit code."""
    printer = StepPrinter()
    end: dict[str, Any] = {}
    for event in events:
        printer.show(event)
        end = event
    if end.get("event") != "end":
        raise PatchctlError(
            code="host.stream_cut",
            what="the agent stopped reporting before the transaction ended",
            why="the connection closed",
            exit_code=ExitCode.UNREACHABLE,
            serving="a whole build: the host commits or goes back by itself",
            next_command="patchctl history",
        )
    if output is Output.JSON:
        print_json(end)
    else:
        print_pairs(
            [("transaction", end["transaction"]), ("state", end["state"]), ("active", end["active"])]
            + [("reason", reason) for reason in end["reasons"]]
        )
    if end["error"] is not None and end["exit_code"] != ExitCode.OK:
        raise PatchctlError(**{**end["error"], "exit_code": ExitCode(end["exit_code"])})
    raise typer.Exit(end["exit_code"])
