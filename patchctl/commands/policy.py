"""``patchctl policy``: ask the gate without a host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from patchctl.commands.options import OutputOption
from patchctl.errors import ExitCode
from patchctl.render.output import Output, print_json, print_table

app = typer.Typer(help="The policy gate.", no_args_is_help=True)
_EXIT = {"allow": ExitCode.OK, "deny": ExitCode.POLICY_DENIED, "hold": ExitCode.HELD}


@app.command()
def check(
    facts: Annotated[Path, typer.Option("--input", help="JSON document of facts (see policies/schema/input.json).")],
    policy: Annotated[Path | None, typer.Option(help="Policy folder.", show_default="the shipped policy")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Decide on a document of facts. Exit 0 allow, 6 deny, 8 hold."""
    import msgspec

    from patchctl.admission.facts import InputInvalidError, decode_input
    from patchctl.admission.gate import decide
    from patchctl.admission.policy import load_default, load_folder
    from patchctl.admission.select import select_engine
    from patchctl.errors import PatchctlError
    from patchctl.inputs import unreadable

    try:
        gate_input = decode_input(facts.read_bytes())
    except OSError as error:
        raise unreadable(facts, error) from error
    except InputInvalidError as error:
        raise PatchctlError(
            code="gate.input_invalid",
            what="nothing was decided",
            why=str(error),
            exit_code=ExitCode.POLICY_DENIED,
            next_command="compare the document with policies/schema/input.json",
        ) from error
    chosen = load_default() if policy is None else load_folder(policy)
    engine = select_engine(os.environ)
    try:
        decision = decide(gate_input, chosen, engine)
    finally:
        engine.close()
    if output is Output.JSON:
        print_json(msgspec.to_builtins(decision))
    else:
        print(f"{decision.outcome} ({decision.engine}, {decision.took_ms:.1f} ms)")
        findings = [("deny", decision.denied), ("hold", decision.held), ("pass", decision.passed)]
        print_table(["", "CHECK", "MESSAGE"], [(word, f.id, f.message) for word, found in findings for f in found])
    raise typer.Exit(_EXIT[decision.outcome])
