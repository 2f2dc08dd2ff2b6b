"""The one door to the ``tensorrt_llm`` package: imported on the first load, failures typed.

The package of that name on the public index is a stub that fetches NVIDIA's wheel when it is installed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from engine.adapters.errors import DeviceMissingError, PackageMissingError, PackageUnusableError
from engine.adapters.tensorrt_llm.features import Features, Importer, detect, resolve
from engine.adapters.tensorrt_llm.signatures import VERSION, point

# What the dynamic linker and CUDA say when there is no driver; libraries of CUDA itself come with the wheel.
_DRIVER_WORDS = ("libcuda.so", "libnvidia-ml.so", "nvidia driver", "cuda driver", "no cuda-capable device")


@dataclass(frozen=True, slots=True)
class Package:
    """The imported package.

    Attributes:
        version: as the package says; shown and compared with an engine's, never used to guess features.
    """

    version: str
    features: Features
    importer: Importer

    def __getitem__(self, name: str) -> Any:
        """The class or function of the table called ``name``.

        Raises:
            KeyError: it is not in the table.
        """
        try:
            return resolve(point(name).name, self.importer)
        except StopIteration as error:
            raise KeyError(name) from error


def open_package(importer: Importer = importlib.import_module) -> Package:
    """Import ``tensorrt_llm`` and see what it offers. Slow the first time (it loads CUDA libraries).

    Raises:
        PackageMissingError: it is not installed.
        DeviceMissingError: no driver, or no GPU that CUDA can use.
        PackageUnusableError: it does not import, or lacks what every use needs.
    """
    try:
        importer("tensorrt_llm")
    except Exception as error:
        # Importing it runs vendor code and loads native libraries: it may fail in any way.
        raise _import_error(error) from error
    _check_device(importer)
    features = detect(importer)
    if "core" not in features:
        raise PackageUnusableError(f"this tensorrt_llm is not one we know: {features.why_not('core')}")
    return Package(version=str(resolve(VERSION, importer)), features=features, importer=importer)


def _import_error(error: Exception) -> PackageMissingError | DeviceMissingError | PackageUnusableError:
    if isinstance(error, ModuleNotFoundError) and error.name == "tensorrt_llm":
        return PackageMissingError(
            "tensorrt_llm is not installed; install patchctl[tensorrt] from NVIDIA's package index"
        )
    if any(word in str(error).lower() for word in _DRIVER_WORDS):
        return DeviceMissingError(f"tensorrt_llm found no GPU driver: {error}")
    return PackageUnusableError(f"tensorrt_llm does not import: {type(error).__name__}: {error}")


def _check_device(importer: Importer) -> None:
    try:
        devices = importer("torch").cuda.device_count()
    except Exception as error:
        # As above: vendor code.
        raise PackageUnusableError(f"torch does not import: {type(error).__name__}: {error}") from error
    if not devices:
        raise DeviceMissingError("CUDA finds no GPU")
