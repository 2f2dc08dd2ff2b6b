"""The compiled CPU backend: one AOTInductor package per topology, weights outside.

A package is compiled once, by a niced process (:mod:`engine.graphs.aoti_compile`), and kept in a store under
the topology's signature: every build with the same topology, whatever its weights, finds it there. Weights are
inputs of the package, so mapped files stay mapped. A compiler fuses and reorders arithmetic: results are
close to the eager ones, not equal.

Two things to know before choosing it. The package runs with the interpreter lock held (``boxed_run`` does not
release it), so staging beside serving gets less of the interpreter than with the tape. And a KV layer that a
step writes to is copied and written back as a whole, so generations cannot share a KV pool.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import platformdirs
import torch

from engine.errors import CaptureError
from engine.graphs.aoti_spec import to_spec
from engine.graphs.errors import BackendUnavailableError
from engine.graphs.port import Captured, Graph
from engine.graphs.record import Recording, check_binding, record
from engine.graphs.result import UpdateResult
from engine.graphs.tape import Done
from engine.graphs.topology import Topology, compare, signature

STORE_VARIABLE = "PATCHCTL_GRAPH_STORE"
# A 30-layer step compiles in minutes on one niced core; what takes longer hangs.
_COMPILE_S_MAX = 1800.0
_ERROR_CHARS_MAX = 400


class PackageStore:
    """Compiled packages in a private folder, by topology, torch version and instruction set."""

    def __init__(self, folder: Path | None = None) -> None:
        asked = os.environ.get(STORE_VARIABLE)
        self._folder = folder or (Path(asked) if asked else platformdirs.user_cache_path("patchctl") / "graphs")

    def get(self, topology: Topology) -> Path:
        """The package of a topology, compiled first if the store lacks it.

        Raises:
            BackendUnavailableError: it has to be compiled and there is no compiler, or the folder is not safe.
            CaptureError: it does not compile.
        """
        self._check_private()
        key = f"{signature(topology)} torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.pt2"
        if not path.exists():
            self._compile(topology, path)
        return path

    def _check_private(self) -> None:
        """A package is machine code: nobody else may be able to put one here."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BackendUnavailableError(f"{self._folder}: others could write compiled code here")

    def _compile(self, topology: Topology, path: Path) -> None:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise BackendUnavailableError(f"no package for this topology in {self._folder}, and no {compiler} here")
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="compile-") as scratch:
            made = Path(scratch) / "model.pt2"
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": scratch, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            try:
                message = msgspec.json.encode(to_spec(topology))
                subprocess.run(
                    [sys.executable, "-P", "-m", "engine.graphs.aoti_compile", str(made)],
                    input=message,
                    env=environment,
                    check=True,
                    capture_output=True,
                    timeout=_COMPILE_S_MAX,
                )
                made.replace(path)
            except (subprocess.SubprocessError, OSError, TypeError) as error:
                said = getattr(error, "stderr", None) or b""
                detail = said.decode(errors="replace").strip()[-_ERROR_CHARS_MAX:]
                raise CaptureError(f"the graph does not compile: {error} {detail}".rstrip()) from error


def _load(path: Path) -> Any:
    """The package, ready to run. The public loader would import the compiler: 2 s and 150 MB."""
    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)  # noqa: SLF001 - see above
    except RuntimeError as error:
        raise CaptureError(f"{path} does not load: {error}") from error


class AotiExec:
    """A package and its inputs: static tensors, then constants."""

    def __init__(self, graph: AotiGraph, package: Any, static: Sequence[torch.Tensor]) -> None:
        self._package = package
        self._static = tuple(static)
        self._bound: tuple[AotiGraph, tuple[torch.Tensor, ...]] | None = (graph, (*static, *graph.constants))

    def replay(self) -> None:
        """Run the package in this thread."""
        assert self._bound is not None, "replay of a closed exec"
        with torch.inference_mode():
            self._package.boxed_run(list(self._bound[1]))

    def update(self, graph: Graph) -> UpdateResult:
        """See :meth:`engine.graphs.port.GraphExec.update`; equal topology means the same package."""
        if self._bound is None:
            return UpdateResult.ERROR
        if not isinstance(graph, AotiGraph):
            return UpdateResult.NOT_SUPPORTED
        result = compare(self._bound[0].topology, graph.topology)
        if result is UpdateResult.SUCCESS:
            self._bound = (graph, (*self._static, *graph.constants))
        return result

    def close(self) -> None:
        """Forget all tensors, and the package when no other exec runs it."""
        self._package, self._bound, self._static = None, None, ()


class AotiGraph:
    """A recording; compiled at the first instantiation, so that capturing stays as quick as on the tape."""

    def __init__(self, recording: Recording, store: PackageStore) -> None:
        self.topology = recording.topology
        self.constants = tuple(recording.constants.values())
        self._store = store
        self._package: Any = None

    @property
    def signature(self) -> str:
        """See :class:`engine.graphs.port.Graph`."""
        return signature(self.topology)

    def instantiate(self, static: Sequence[torch.Tensor]) -> AotiExec:
        """See :meth:`engine.graphs.port.Graph.instantiate`.

        Raises:
            CaptureError: as in the protocol, or the graph does not compile, or static tensors share memory.
            BackendUnavailableError: it would have to be compiled and there is no compiler.
        """
        check_binding(static, self.topology.static)
        if len({tensor.untyped_storage().data_ptr() for tensor in static}) < len(static):
            raise CaptureError("static tensors share memory, which the compiler does not know")
        if self._package is None:
            self._package = _load(self._store.get(self.topology))
        return AotiExec(self, self._package, static)


class AotiBackend:
    """See :class:`engine.graphs.port.GraphBackend`."""

    name = "aoti"
    # Of float32 sums over some thousand elements in another order; 100 times the spacing of float32.
    tolerance = 1e-5
    # The compiler turns a write through a view into a copy of the viewed part, and copies that back.
    in_place = False

    def __init__(self, store: PackageStore | None = None) -> None:
        self._store = store or PackageStore()

    def capture(self, function: Captured, static: Sequence[torch.Tensor]) -> AotiGraph:
        """See :meth:`engine.graphs.port.GraphBackend.capture`."""
        return AotiGraph(record(function, static), self._store)

    def stream(self) -> AbstractContextManager[None]:
        """The calling thread."""
        return nullcontext()

    def launched(self) -> Done:
        """See :meth:`engine.graphs.port.GraphBackend.launched`."""
        return Done()

    def wait(self) -> None:
        """Replay returned, so it is done."""

    def close(self) -> None:
        """Nothing outlives the execs."""
