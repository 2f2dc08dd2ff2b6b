"""``patchctl demo``: the product's story in two minutes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from patchctl.commands.options import OutputOption
from patchctl.render.output import Output, print_json


def demo(
    model: Annotated[
        Path | None, typer.Option(help="A Llama-family folder to serve.", show_default="SmolLM2-135M-Instruct")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary home.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Hot-patch a live LLM: sign, gate, swap, verify, commit; then watch a bad patch roll itself back."""
    from patchctl.demo.report import as_data, print_story
    from patchctl.demo.scenario import play, prepare_model, temporary_home

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    folder, name = prepare_model(model, tell)
    with temporary_home(keep=keep, tell=tell) as home:
        story = play(home, folder, name, tell)
        data = as_data(story)
    if output is Output.JSON:
        print_json(data)
    else:
        tell("")
        print_story(data)
