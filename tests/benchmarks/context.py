"""What a section is given: options, a folder of its own, and the builds of the real model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from engine.build import MANIFEST_NAME, BuildManifest, read_manifest, seal_build
from patchctl.demo.builds import REQUEST_PATH, Builds, make_builds
from patchctl.demo.scenario import prepare_model


@dataclass(frozen=True, slots=True)
class Options:
    """From the command line.

    Attributes:
        rounds: how often every arm is measured.
        window_s: length of one baseline window.
        swaps: swaps of the memory section.
        requests: of the requests section.
        requests_s_max: its limit in time.
        model: model folder; None is SmolLM2.
        vllm: the vllm command of an environment that has it.
    """

    rounds: int = 5
    window_s: float = 6.0
    swaps: int = 20
    requests: int = 2000
    requests_s_max: float = 120.0
    model: Path | None = None
    vllm: str = "vllm"


@dataclass(frozen=True, slots=True)
class Build:
    """A sealed build on disk."""

    folder: Path
    manifest: BuildManifest

    @property
    def digest(self) -> str:
        """What the host stages it by."""
        return self.manifest.digest

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weight files."""
        return sum(entry.size_bytes for entry in self.manifest.weight_files)


@dataclass(frozen=True, slots=True)
class Trio:
    """A build, one with the same weights and another request path, one with one tensor changed."""

    base: Build
    same: Build
    changed: Build


@dataclass
class Bench:
    """The run. ``folder`` is deleted when it ends."""

    folder: Path
    options: Options
    tell: Callable[[str], None] = field(default=print)

    @cached_property
    def demo(self) -> tuple[Builds, str]:
        """The demo's builds of the real model, and its name; weights are linked, not copied, where possible."""
        model, name = prepare_model(self.options.model, self.tell)
        return make_builds(model, name, self.folder / "smollm2"), name

    @cached_property
    def smollm2(self) -> Trio:
        """Builds of the real model."""
        made, _ = self.demo
        base = Build(made.folders["1.0.1"], made.manifests["1.0.1"])
        same = other_request_path(base, self.folder / "smollm2" / "same")
        return Trio(base, same, Build(made.folders["1.0.2"], made.manifests["1.0.2"]))


def other_request_path(build: Build, folder: Path) -> Build:
    """The same build with one more comment in its request path: the smallest hotfix there is."""
    shutil.copytree(build.folder, folder, copy_function=_link)
    (folder / MANIFEST_NAME).unlink()
    code = (folder / REQUEST_PATH).read_bytes()
    (folder / REQUEST_PATH).unlink()
    (folder / REQUEST_PATH).write_bytes(code + b"# hotfix\n")
    manifest = read_manifest(build.folder)
    sealed = seal_build(
        folder,
        name=manifest.name,
        version=f"{manifest.version}-hotfix",
        model=manifest.model,
        request_path=REQUEST_PATH,
        runtime=manifest.runtime,
    )
    return Build(folder, sealed)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target
