"""Facts about the machine, without which no figure means anything."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "transformers", "starlette", "uvicorn", "httpx")


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory, load, kernel, versions."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "load_1m_at_start": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "versions": {name: _version(name) for name in _LIBRARIES},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
