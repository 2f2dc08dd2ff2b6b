"""``patchctl trust``: the local trust domain."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from patchctl.commands.options import HomeOption, OutputOption
from patchctl.home import Home
from patchctl.render.output import Output, flat_pairs, print_json, print_pairs

app = typer.Typer(help="Trust domains: who may sign what runs here.", no_args_is_help=True)
_Name = Annotated[str, typer.Argument(help="Name of the domain.")]


@app.command()
def init(name: _Name = "local", home: HomeOption = None, output: OutputOption = Output.TABLE) -> None:
    """Create a local trust domain. Whoever reads its keys is every identity in it: not for production."""
    from patchctl.trust.domain import LocalDomain

    domain = LocalDomain.create(Home.resolve(home).trust / name, name)
    _print(domain.describe(), output)


@app.command()
def show(name: _Name = "local", home: HomeOption = None, output: OutputOption = Output.TABLE) -> None:
    """Fingerprint and issuer of a domain."""
    from patchctl.trust.domain import LocalDomain

    _print(LocalDomain.open(Home.resolve(home).trust / name).describe(), output)


@app.command()
def export(name: _Name = "local", home: HomeOption = None) -> None:
    """Write the domain's trusted root (public material only) to stdout, for hosts that shall accept it."""
    from patchctl.trust.domain import LocalDomain

    sys.stdout.write(LocalDomain.open(Home.resolve(home).trust / name).trusted_root_json() + "\n")


def _print(described: Mapping[str, object], output: Output) -> None:
    if output is Output.JSON:
        print_json(described)
    else:
        print_pairs(flat_pairs(described))
