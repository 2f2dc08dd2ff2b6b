"""Commands on patch files: build, inspect, sign, verify."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchctl.commands.host import ATTESTATION_SUFFIX
from patchctl.commands.options import HomeOption, OutputOption
from patchctl.errors import ExitCode, PatchctlError
from patchctl.home import Home
from patchctl.render.output import Output, flat_pairs, human_bytes, print_json, print_pairs

if TYPE_CHECKING:
    from patchctl.bundle.compose import PatchInfo

_DAY_S = 86_400
_PatchFile = Annotated[Path, typer.Argument(help="The patch file.")]
_Domain = Annotated[str, typer.Option(help="Trust domain.")]


def build(
    base: Annotated[Path, typer.Argument(help="Folder of the build that serves now.")],
    target: Annotated[Path, typer.Argument(help="Folder of the build that shall serve.")],
    out: Annotated[Path, typer.Option("--out", "-O", help="Patch file to write.")],
    sequence: Annotated[int, typer.Option(min=1, help="Place in the channel; hosts refuse to go back.")],
    patch_id: Annotated[str | None, typer.Option(help="Name of the patch.", show_default="hotfix-VERSION")] = None,
    channel: Annotated[str, typer.Option(help="Release channel the sequence counts in.")] = "stable",
    author: Annotated[str | None, typer.Option(help="Who wrote the change.", show_default="this user")] = None,
    valid_days: Annotated[int, typer.Option(min=1, help="Days until the patch expires.")] = 30,
    declare_file: Annotated[list[str] | None, typer.Option(help="A file the patch changes; repeatable.")] = None,
    declare_tensor: Annotated[
        list[str] | None, typer.Option(help="A tensor (name or glob) the patch changes; repeatable.")
    ] = None,
    growth_max: Annotated[
        int | None, typer.Option(min=0, help="Bytes of memory one request may leave behind.", show_default="undeclared")
    ] = None,
    summary: Annotated[str, typer.Option(help="One line for the humans who approve it.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a patch file from two builds. Only what changed travels; same inputs, same bytes.

    SOURCE_DATE_EPOCH sets the creation time, as in other reproducible builds.
    """
    from engine.build import BuildInvalidError, read_manifest
    from patchctl.bundle.compose import PatchMeta, compose
    from patchctl.bundle.config import Declared

    created_unix = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    try:
        version = read_manifest(target).version
    except BuildInvalidError as error:
        raise PatchctlError(
            code="build.invalid",
            what=f"{target} is not a build",
            why=str(error),
            exit_code=ExitCode.NOT_FOUND if not target.exists() else ExitCode.USAGE,
            next_command=f"ls -l {target}",
        ) from error
    info = compose(
        base,
        target,
        out,
        PatchMeta(
            patch_id=patch_id or f"hotfix-{version}",
            channel=channel,
            sequence=sequence,
            created_unix=created_unix,
            expires_unix=created_unix + valid_days * _DAY_S,
            author=author or getpass.getuser(),
        ),
        Declared(
            files=tuple(sorted(declare_file or ())),
            tensors=tuple(sorted(declare_tensor or ())),
            growth_bytes_per_request_max=growth_max,
            summary=summary,
        ),
    )
    _print_built(info, output)


def _print_built(info: PatchInfo, output: Output) -> None:
    if output is Output.JSON:
        print_json(
            {
                "path": str(info.path),
                "manifest_digest": info.manifest_digest,
                "size_bytes": info.size_bytes,
                "build_size_bytes": info.build_size_bytes,
                "actions": dict(info.actions),
                "changed_files": info.changed_files,
                "changed_tensors": info.changed_tensors,
                "undeclared": info.undeclared._asdict(),
            }
        )
        return
    print_pairs(
        [
            ("patch", info.path),
            ("digest", f"sha256:{info.manifest_digest}"),
            ("size", f"{human_bytes(info.size_bytes)} for a build of {human_bytes(info.build_size_bytes)}"),
            ("changes", ", ".join([*info.changed_files, *info.changed_tensors]) or "nothing"),
        ]
    )
    uncovered = [*info.undeclared.files, *info.undeclared.tensors]
    if uncovered:
        typer.echo(f"undeclared: {', '.join(uncovered)}: hosts deny this, or roll it back", err=True)


def inspect(patch: _PatchFile, output: OutputOption = Output.TABLE) -> None:
    """Everything a patch file says about itself, after every byte of it was checked."""
    from patchctl.bundle.describe import describe
    from patchctl.bundle.read import PatchFile

    with PatchFile.open(patch) as opened:
        described = describe(opened)
    if output is Output.JSON:
        print_json(described)
    else:
        print_pairs(flat_pairs(described))


def sign(
    patch: _PatchFile,
    identity: Annotated[str, typer.Option(help="Who signs: an e-mail address or a URI.")],
    domain: _Domain = "local",
    out: Annotated[
        Path | None, typer.Option("--out", "-O", help="File to write.", show_default=f"PATCH{ATTESTATION_SUFFIX}")
    ] = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Sign a patch in a trust domain: certificate, log entry and timestamp in one Sigstore bundle."""
    from patchctl.atomic import write_atomic
    from patchctl.bundle.read import PatchFile
    from patchctl.claims import predicate_of
    from patchctl.trust.domain import LocalDomain
    from patchctl.trust.sign import sign_statement
    from patchctl.trust.statement import encode_hotfix

    signer = LocalDomain.open(Home.resolve(home).trust / domain)
    with PatchFile.open(patch) as opened:
        digest = opened.manifest_digest
        statement = encode_hotfix(patch.name, digest, predicate_of(opened.config))
    line = sign_statement(signer, identity, statement)
    destination = out or patch.with_name(patch.name + ATTESTATION_SUFFIX)
    write_atomic(destination, line.encode() + b"\n")
    data = {"attestations": str(destination), "domain": domain, "identity": identity, "subject": f"sha256:{digest}"}
    if output is Output.JSON:
        print_json(data)
    else:
        print_pairs(data.items())


def verify(
    patch: _PatchFile,
    identity: Annotated[str, typer.Option(help="The identity that must have signed, exactly.")],
    issuer: Annotated[str | None, typer.Option(help="Its issuer.", show_default="the domain's own")] = None,
    domain: _Domain = "local",
    attestations: Annotated[Path | None, typer.Option(show_default=f"PATCH{ATTESTATION_SUFFIX}")] = None,
    home: HomeOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check a patch file and its signature, offline: certificate, SCT, log inclusion, timestamp, identity."""
    from patchctl.bundle.read import PatchFile
    from patchctl.trust.attestations import verify_file
    from patchctl.trust.domain import LocalDomain
    from patchctl.trust.verify import require_identity

    trusted = LocalDomain.open(Home.resolve(home).trust / domain)
    with PatchFile.open(patch) as opened:
        digest = opened.manifest_digest
    beside = attestations or patch.with_name(patch.name + ATTESTATION_SUFFIX)
    statement = verify_file({domain: trusted.trusted_root_json()}, beside, digest).statements[0]
    require_identity(statement, domain=domain, issuer=issuer or trusted.issuer, identity=identity)
    data = {
        "verified": f"sha256:{digest}",
        "domain": statement.domain,
        "issuer": statement.issuer,
        "identity": statement.identity,
        "signed_at_unix": statement.signed_at_unix,
        "log_index": statement.log_index,
    }
    if output is Output.JSON:
        print_json(data)
    else:
        print_pairs(flat_pairs(data))
