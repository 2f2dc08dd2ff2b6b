"""The conformance suite (engine/graphs/conformance.py) on every graph backend that this machine can run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("engine.graphs.conformance")

from engine.graphs.aoti import AotiBackend, PackageStore  # noqa: E402 - after assertions are made to explain themselves
from engine.graphs.conformance import CASES  # noqa: E402
from engine.graphs.cuda import CudaBackend  # noqa: E402
from engine.graphs.simulated import SimulatedDriver  # noqa: E402
from engine.graphs.tape import TapeBackend  # noqa: E402
from engine.graphs.testing import Subject  # noqa: E402

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
AOTI = pytest.param(
    "aoti",
    # The first case waits for the compiler, niced: some 20 s of CPU.
    marks=[pytest.mark.timeout(900), pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")],
)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all cases: they capture one topology, which takes some 20 s to compile."""
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(params=["tape", "simulated-cuda", AOTI, CUDA])
def subject(request: pytest.FixtureRequest, packages: Path) -> Subject:
    cpu = torch.device("cpu")
    if request.param == "aoti":
        return Subject(lambda: AotiBackend(PackageStore(packages)), cpu)
    if request.param == "simulated-cuda":
        return Subject(lambda: CudaBackend(SimulatedDriver()), cpu)
    if request.param == "cuda":
        return Subject(CudaBackend, torch.device("cuda", 0))
    return Subject(TapeBackend, cpu)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_backend(subject: Subject, case: Callable[[Subject], None]) -> None:
    case(subject)
