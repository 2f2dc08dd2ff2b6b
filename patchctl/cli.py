"""The command line: registers the commands and turns every failure into one explained error."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from patchctl import __version__
from patchctl.commands import engine, host, patch, policy, snapshot, trust
from patchctl.commands.demo import demo
from patchctl.errors import ExitCode, PatchctlError
from patchctl.render.error import print_error

# What only the `engine` extra brings; see pyproject.toml.
_ENGINE_EXTRA = frozenset(
    {
        "torch",
        "numpy",
        "safetensors",
        "tokenizers",
        "jinja2",
        "gguf",
        "xxhash",
        "starlette",
        "uvicorn",
        "sqlalchemy",
        "blake3",
    }
)

app = typer.Typer(
    name="patchctl",
    help="Hotfixes for live LLM inference engines: sign, gate, swap, verify, then commit or roll back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help needs no rich import: a third of the start-up time.
    rich_markup_mode=None,
)
app.command("demo")(demo)
app.command("build")(patch.build)
app.command("inspect")(patch.inspect)
app.command("sign")(patch.sign)
app.command("verify")(patch.verify)
app.command("deploy")(host.deploy)
app.command("status")(host.status)
app.command("history")(host.history)
app.command("rollback")(host.rollback)
app.add_typer(trust.app, name="trust")
app.add_typer(policy.app, name="policy")
app.add_typer(engine.app, name="engine")
app.add_typer(snapshot.app, name="snapshot")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"patchctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


class _Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt: typer would turn that into a bare "Aborted"."""


def _interrupt(_signum: int, _frame: object) -> None:
    # Once is enough: what follows is the way out, and it is bounded in time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise _Interrupted


def main() -> None:
    """Console entry point: runs a command and exits with the documented code."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except PatchctlError as error:
        print_error(error, as_json=_wants_json(sys.argv))
        sys.exit(error.exit_code)
    except _Interrupted:
        print_error(_interrupted(), as_json=_wants_json(sys.argv))
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        # The last boundary: an operator gets an explained error, a developer the traceback on request.
        if os.environ.get("PATCHCTL_DEBUG"):
            raise
        explained = _explain(error)
        print_error(explained, as_json=_wants_json(sys.argv))
        sys.exit(explained.exit_code)


def _wants_json(arguments: list[str]) -> bool:
    return any(
        argument in ("-ojson", "--output=json") or (argument in ("-o", "--output") and following == "json")
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True)
    )


def _interrupted() -> PatchctlError:
    return PatchctlError(
        code="cli.interrupted",
        what="this command stopped",
        why="it was interrupted (Ctrl-C)",
        exit_code=ExitCode.INTERRUPTED,
        serving="whatever served before; a transaction that started goes on in the host",
        next_command="patchctl status",
    )


def _explain(error: Exception) -> PatchctlError:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _ENGINE_EXTRA:
        return PatchctlError(
            code="cli.extra_missing",
            what="this command needs the engine host's packages",
            why=f"{error.name} is not installed; the base install is for release jobs and operators",
            exit_code=ExitCode.NOT_FOUND,
            next_command="pip install 'patchctl[engine]'",
        )
    return PatchctlError(
        code="cli.internal",
        what="patchctl failed in a way it should not",
        why=f"{type(error).__name__}: {error}",
        serving="whatever served before",
        next_command="run the same command with PATCHCTL_DEBUG=1 for the traceback",
    )
