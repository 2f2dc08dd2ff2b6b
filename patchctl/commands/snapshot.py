"""``patchctl snapshot``: memory of the engine host, or of any process, read from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from patchctl.commands.options import HomeOption, HostOption, OutputOption
from patchctl.errors import ExitCode, PatchctlError
from patchctl.home import Home
from patchctl.render.output import Output, print_json, print_pairs, print_table
from patchctl.render.snapshot import (
    print_description,
    print_difference,
    print_list,
    print_restored,
    print_taken,
)

app = typer.Typer(help="Memory of the engine host, or of any process.", no_args_is_help=True)

LocalOption = Annotated[bool, typer.Option("--local", help="Of snapshots of any process, not of the engine host.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="A snapshot, by a unique beginning, or latest.")]


class Snapshots(Protocol):
    """Where snapshots are: the engine host's agent, or this machine's home."""

    def entries(self) -> list[dict[str, Any]]:
        """All, oldest first."""

    def show(self, identifier: str) -> dict[str, Any]:
        """One."""

    def diff(self, before: str, after: str | None) -> dict[str, Any]:
        """Two, or one and now."""

    def verify(self) -> dict[str, Any]:
        """Re-hash everything."""

    def remove(self, identifier: str) -> dict[str, Any]:
        """Delete one."""

    def restore(self, identifier: str, names: list[str], generation: int | None) -> dict[str, Any]:
        """Write named tensors back."""


def _place(host: Path | None, home: Path | None, *, local: bool) -> Snapshots:
    if local:
        from patchctl.local_snapshots import LocalSnapshots

        return LocalSnapshots(Home.resolve(home).snapshots)
    from patchctl.snapshot_client import SnapshotClient

    return SnapshotClient(host or Home.resolve(home).socket)


@app.command()
def probe(output: OutputOption = Output.TABLE) -> None:
    """What this kernel and these rights let patchctl see."""
    from snapshots.capture.probe import probe as look

    found = look().as_dict()
    if output is Output.JSON:
        print_json(found)
    else:
        print_table(
            ["FEATURE", "", "DETAIL"],
            [(name, "yes" if f["available"] else "no", f["detail"]) for name, f in found.items()],
        )


@app.command()
def take(
    pid: Annotated[
        int | None, typer.Argument(min=1, help="Any process; it keeps running.", show_default="the engine host")
    ] = None,
    label: Annotated[str, typer.Option(help="Why it is taken, for the list.")] = "manual",
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Capture memory, region by region, and keep it: of the engine host with its tensors, or of any process."""
    if pid is None:
        from patchctl.snapshot_client import SnapshotClient

        data = SnapshotClient(host or Home.resolve(home).socket).take(label)
    else:
        from patchctl.local_snapshots import LocalSnapshots

        data = LocalSnapshots(Home.resolve(home).snapshots).take(pid, label)
    _show(data, output, print_taken)


@app.command("list")
def list_(
    local: LocalOption = False,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Snapshots that are kept, oldest first."""
    entries = _place(host, home, local=local).entries()
    if output is Output.JSON:
        print_json(entries)
    else:
        print_list(entries)


@app.command()
def show(
    identifier: IdArgument,
    local: LocalOption = False,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """One snapshot: processes, regions with method and confidence, tensors. -o json shows everything."""
    _show(_place(host, home, local=local).show(identifier), output, print_description)


@app.command()
def diff(
    before: IdArgument,
    after: Annotated[
        str | None, typer.Argument(metavar="ID", help="A later snapshot.", show_default="memory as it is now")
    ] = None,
    local: LocalOption = False,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """What is new, gone or changed between two snapshots, or between one and now; largest growth first."""
    _show(_place(host, home, local=local).diff(before, after), output, print_difference)


@app.command()
def restore(
    identifier: IdArgument,
    tensor: Annotated[list[str] | None, typer.Option(help="Name or glob of a tensor; repeatable.")] = None,
    generation: Annotated[
        int | None, typer.Option(min=1, help="Resident generation to restore.", show_default="the active one")
    ] = None,
    local: LocalOption = False,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write stored tensors back into the running engine, bit-exactly, between two of its steps."""
    if not tensor:
        raise PatchctlError(
            code="cli.usage",
            what="nothing was restored",
            why="no tensor was named; only named tensors can be restored",
            exit_code=ExitCode.USAGE,
            next_command=f"patchctl snapshot restore {identifier} --tensor NAME",
        )
    _show(_place(host, home, local=local).restore(identifier, tensor, generation), output, print_restored)


@app.command()
def verify(
    local: LocalOption = False,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Re-hash every stored chunk."""
    _show(_place(host, home, local=local).verify(), output, lambda data: print_pairs(data.items()))


@app.command()
def remove(
    identifier: IdArgument,
    local: LocalOption = False,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a snapshot and the content that only it holds."""
    _show(_place(host, home, local=local).remove(identifier), output, lambda data: print_pairs(data.items()))


class _Printer(Protocol):
    def __call__(self, data: dict[str, Any], /) -> None: ...


def _show(data: dict[str, Any], output: Output, table: _Printer) -> None:
    if output is Output.JSON:
        print_json(data)
    else:
        table(data)
