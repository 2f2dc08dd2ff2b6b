"""How much a run does: enough on a GPU for percentiles within five minutes, next to nothing on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.build import BuildManifest, RuntimeOptions
from engine.testing import tiny_build


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the model and of each check.

    Attributes:
        streams: requests under way at any time.
        rounds: measured repetitions of what takes milliseconds.
        exchanges: swaps to and fro, for each commit mode.
        swaps: swaps with staging before and release after each.
        swaps_s_max: stop swapping after this many seconds, however many were done.
    """

    layers: int
    hidden: int
    vocab: int
    runtime: RuntimeOptions
    streams: int
    rounds: int
    exchanges: int
    swaps: int
    swaps_s_max: float


SCALES: Mapping[str, Scale] = {
    # 12 x 1024 in float32 is 0.6 GB of weights: large enough that copying them is not free. Seven buckets.
    "cuda": Scale(
        layers=12,
        hidden=1024,
        vocab=32_000,
        runtime=RuntimeOptions(batch_sizes=(1, 8, 32), contexts=(256,), prefill_chunk_tokens=64),
        streams=32,
        rounds=200,
        exchanges=50,
        swaps=50,
        swaps_s_max=140.0,
    ),
    "cpu": Scale(
        layers=2,
        hidden=64,
        vocab=256,
        runtime=RuntimeOptions(batch_sizes=(1, 4), contexts=(64,), prefill_chunk_tokens=8),
        streams=4,
        rounds=20,
        exchanges=6,
        swaps=4,
        swaps_s_max=30.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Build:
    """A build on disk."""

    folder: Path
    digest: str


@dataclass(frozen=True, slots=True)
class Context:
    """What every check gets.

    Attributes:
        first: the build that serves first.
        twin: its weights, another version.
        other: other weights.
    """

    device: torch.device
    scale: Scale
    first: Build
    twin: Build
    other: Build


def make_context(device: torch.device, scratch: Path) -> Context:
    """Write three builds below ``scratch``."""
    scale = SCALES[device.type]

    def build(name: str, seed: int) -> Build:
        folder = scratch / name
        manifest: BuildManifest = tiny_build(
            folder,
            seed=seed,
            version=name,
            layers=scale.layers,
            hidden=scale.hidden,
            vocab=scale.vocab,
            runtime=scale.runtime,
        )
        return Build(folder, manifest.digest)

    return Context(device, scale, build("first", 1), build("twin", 1), build("other", 2))
