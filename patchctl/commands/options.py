"""Options that several commands share, declared once."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from patchctl.render.output import Output

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="Folder for trust domains and host state. [env: PATCHCTL_HOME]", show_default=False),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Data format on stdout.")]
HostOption = Annotated[
    Path | None,
    typer.Option("--host", help="The agent's unix socket.", envvar="PATCHCTL_HOST", show_default="the home's own"),
]


class SwapPolicy(enum.StrEnum):
    """Value of ``--policy`` of a deploy."""

    AUTO = "auto"
    CARRY = "carry"
    RECOMPUTE = "recompute"
    DRAIN = "drain"


class CommitMode(enum.StrEnum):
    """Value of ``--commit-mode``."""

    AUTO = "auto"
    EXCHANGE = "exchange"
    COPY = "copy"


class ReclaimPolicy(enum.StrEnum):
    """Value of ``--policy`` of a reclaim."""

    EXPLICIT = "explicit"
    THRESHOLD = "threshold"
