"""``patchctl snapshot``: memory of a live process, read from outside."""

from __future__ import annotations

from typing import Annotated

import typer

from patchctl.commands.options import OutputOption
from patchctl.errors import ExitCode, PatchctlError
from patchctl.render.output import Output, human_bytes, print_json, print_table

app = typer.Typer(help="Memory of a live process.", no_args_is_help=True)
_ROWS_MAX = 15


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
    pid: Annotated[int, typer.Argument(min=1, help="The process to read; it keeps running.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Read a process's memory regions, largest first, with method and confidence of each."""
    from snapshots.capture.errors import CaptureError
    from snapshots.capture.process import capture_process

    try:
        snapshot = capture_process(pid, "process")
    except CaptureError as error:
        raise PatchctlError(
            code="snapshot.failed",
            what=f"process {pid} was not captured",
            why=str(error),
            exit_code=ExitCode.NOT_FOUND,
            serving="the process, untouched",
            next_command="patchctl snapshot probe",
        ) from error
    regions = sorted(snapshot.regions, key=lambda region: -region.anonymous_bytes)
    if output is Output.JSON:
        rows = [
            {
                "label": r.label,
                "rss_bytes": r.rss_bytes,
                "anonymous_bytes": r.anonymous_bytes,
                "method": r.method,
                "confidence": r.confidence,
                "reason": r.reason,
            }
            for r in regions
        ]
        print_json({"pid": pid, "rss_bytes": snapshot.rss_bytes, "regions": rows})
        return
    print_table(
        ["ANONYMOUS", "RSS", "METHOD", "CONFIDENCE", "REGION"],
        [
            (human_bytes(r.anonymous_bytes), human_bytes(r.rss_bytes), r.method, r.confidence, r.label)
            for r in regions[:_ROWS_MAX]
        ],
    )
    if len(regions) > _ROWS_MAX:
        typer.echo(f"{len(regions) - _ROWS_MAX} smaller regions left out; -o json shows all", err=True)
