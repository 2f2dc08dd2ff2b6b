"""The compiling process: reads a graph on stdin, leaves an AOTInductor package at the path it was given.

Started niced and alone by :mod:`engine.graphs.aoti`; importing the compiler costs seconds and 150 MB, and
compiling in a thread of the engine would stop its serve loop for as long.
"""

from __future__ import annotations

import operator as python_operator
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.graphs.aoti_spec import GraphSpec, decode, operator
from engine.graphs.topology import TensorSpec
from engine.lifetime import die_with_parent

# As the stager (patchctl/agent/stager.py): at 19 a saturated host would hardly let it finish.
_NICE = 10


def _example(spec: TensorSpec) -> torch.Tensor:
    """A tensor of that layout; its pages are never touched, so weights cost no memory here."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=spec.device)


def to_module(spec: GraphSpec) -> torch.fx.GraphModule:
    """The graph as a module that takes ``spec.inputs`` and returns nothing; it writes to its inputs."""
    graph = torch.fx.Graph()
    values: dict[int, Any] = {value: graph.placeholder(f"input_{value}") for value in spec.input_values}
    for call in spec.calls:
        args = tuple(decode(arg, values) for arg in call.args)
        kwargs = {key: decode(arg, values) for key, arg in call.kwargs.items()}
        node = graph.call_function(operator(call), args, kwargs)
        for number, output in enumerate(call.outputs):
            if output is not None:
                values[output] = graph.call_function(python_operator.getitem, (node, number)) if call.listed else node
    graph.output(())
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def compile_package(spec: GraphSpec, path: Path) -> None:
    """Compile and write the package."""
    from torch._inductor import aoti_compile_and_package

    with torch.no_grad():
        program = torch.export.export(to_module(spec), tuple(map(_example, spec.inputs)))
        aoti_compile_and_package(program, package_path=str(path))


def main() -> None:
    """Entry point: ``python -m engine.graphs.aoti_compile PATH.pt2 < graph.json``."""
    die_with_parent()
    os.nice(_NICE)
    torch.set_num_threads(1)
    compile_package(msgspec.json.decode(sys.stdin.buffer.read(), type=GraphSpec), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
