"""``patchctl engine``: the engine host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from patchctl.commands.options import HomeOption, HostOption, OutputOption, ReclaimPolicy
from patchctl.errors import ExitCode, PatchctlError
from patchctl.home import Home
from patchctl.render.output import Output, flat_pairs, print_json, print_pairs, short_digest

app = typer.Typer(help="The engine host: serves a build and takes patches.", no_args_is_help=True)


@app.command()
def serve(
    build: Annotated[
        Path | None, typer.Option(help="Build folder a new host starts with; later the journal decides.")
    ] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT of the OpenAI-compatible API; port 0 picks one.")] = (
        "127.0.0.1:8000"
    ),
    environment: Annotated[
        str, typer.Option(help="production, staging or lab: which policy rules apply to this host.")
    ] = "production",
    policy_data: Annotated[
        Path | None, typer.Option(help="JSON merged into the policy's settings, e.g. who may sign.")
    ] = None,
    trusted_root: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE of a trust domain to accept; repeatable. Default: the home's own domains."),
    ] = None,
    bake_s: Annotated[float, typer.Option(min=1, help="Seconds a new generation is watched.")] = 12.0,
    bake_max_s: Annotated[float, typer.Option(min=1, help="Longest wait for enough requests to judge.")] = 120.0,
    restarts_max: Annotated[
        int, typer.Option(min=1, help="Lost processes replaced within a minute before the host gives up.")
    ] = 5,
    snapshots_max: Annotated[
        int, typer.Option(min=1, help="Memory snapshots kept beside those that recent transactions refer to.")
    ] = 20,
    snapshots_gib: Annotated[float, typer.Option(min=0.01, help="Disk that all memory snapshots may take.")] = 16.0,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Serve a build, take signed patches, and go back by itself when one misbehaves."""
    from patchctl.agent.serve import serve as run
    from patchctl.agent.settings import BakeLimits, Settings
    from snapshots.store.retention import RetentionLimits

    place = Home.resolve(home)
    if environment not in ("production", "staging", "lab"):
        raise _usage(f"--environment {environment}", "it is production, staging or lab")

    def on_ready(ready: dict[str, Any]) -> None:
        if output is Output.JSON:
            print(json.dumps(ready), flush=True)
        else:
            print(
                f"serving {ready['version']} (generation {ready['generation']}, {short_digest(ready['digest'])})"
                f" at {ready['url']}; agent at {ready['socket']}",
                flush=True,
            )

    run(
        place,
        build=build,
        listen=_address(listen),
        settings=Settings(
            environment=environment,  # type: ignore[arg-type]  # checked above
            bake=BakeLimits(bake_s=bake_s, bake_s_max=bake_max_s),
            restarts_max=restarts_max,
            retention=RetentionLimits(snapshots_max, int(snapshots_gib * 2**30)),
        ),
        policy=_policy(policy_data),
        trusted_roots=_trusted_roots(place, trusted_root),
        on_ready=on_ready,
    )


@app.command()
def reclaim(
    now: Annotated[
        bool, typer.Option("--now", help="Give unused memory back once, at the next step boundary.")
    ] = False,
    policy: Annotated[
        ReclaimPolicy | None,
        typer.Option(
            help="explicit: only when told; threshold: by itself above HIGH, until below LOW.", show_default="unchanged"
        ),
    ] = None,
    high: Annotated[float, typer.Option(min=0, max=1, help="Share of memory in use that starts it.")] = 0.85,
    low: Annotated[float, typer.Option(min=0, max=1, help="Share of memory in use that ends it.")] = 0.75,
    host: HostOption = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set when the running engine gives memory back, or make it do so now."""
    from patchctl.client import AgentClient

    if not now and policy is None:
        raise _usage("engine reclaim", "it needs --now, --policy, or both", "patchctl engine reclaim --help")
    with AgentClient(host or Home.resolve(home).socket) as client:
        data = client.reclaim({"policy": policy, "high": high, "low": low, "now": now})
    if output is Output.JSON:
        print_json(data)
    else:
        print_pairs(flat_pairs({name: value for name, value in data.items() if name != "schema"}))


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise _usage(f"--listen {text}", "it is HOST:PORT")
    return host.strip("[]"), int(port)


def _policy(data: Path | None) -> Any:
    from patchctl.admission.policy import load_default
    from patchctl.inputs import unreadable

    policy = load_default()
    if data is None:
        print("no --policy-data: nobody may sign for this host, every patch will be denied", file=sys.stderr)
        return policy
    try:
        overrides = json.loads(data.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(data, error) from error
    except ValueError as error:
        raise _usage(f"--policy-data {data}", f"not JSON: {error}") from error
    return policy.with_data(overrides)


def _trusted_roots(place: Home, given: list[str] | None) -> dict[str, str]:
    from patchctl.inputs import unreadable
    from patchctl.trust.domain import LocalDomain

    roots: dict[str, str] = {}
    if given is None:
        folders = sorted(place.trust.iterdir()) if place.trust.is_dir() else []
        return {folder.name: LocalDomain.open(folder).trusted_root_json() for folder in folders}
    for item in given:
        name, equals, file = item.partition("=")
        if not equals or not name:
            raise _usage(f"--trusted-root {item}", "it is NAME=FILE")
        try:
            roots[name] = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise unreadable(Path(file), error) from error
    return roots


def _usage(what: str, why: str, next_command: str = "patchctl engine serve --help") -> PatchctlError:
    return PatchctlError(
        code="cli.usage",
        what=f"{what} was not understood",
        why=why,
        exit_code=ExitCode.USAGE,
        next_command=next_command,
    )
