"""Tiny builds that a front can serve: same weights or other ones, by seed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from engine.build import RuntimeOptions
from engine.front.testing import TINY_VOCABULARY, tiny_tokenizer_files
from engine.testing import tiny_build
from patchctl.demo.builds import REQUEST_PATH
from tests.benchmarks.context import Build

_CONTEXT_TOKENS = 256


def make_tiny(folder: Path, *, seed: int, version: str) -> Build:
    """A two-layer model for up to four sequences of 256 tokens; same ``seed``, same weights."""
    code = files("patchctl.demo.paths").joinpath("request_path_1_0_1.py").read_bytes()
    manifest = tiny_build(
        folder,
        seed=seed,
        version=version,
        vocab=TINY_VOCABULARY,
        request_path=REQUEST_PATH,
        extra_files={**tiny_tokenizer_files(), REQUEST_PATH: code},
        runtime=RuntimeOptions(batch_sizes=(1, 4), contexts=(_CONTEXT_TOKENS,)),
    )
    return Build(folder, manifest)
