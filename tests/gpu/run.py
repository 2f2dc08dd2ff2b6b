"""Everything that needs a GPU to be believed, in one run of less than five minutes.

``python -m tests.gpu.run [FOLDER]`` from the root of the repository prints tables and writes ``results.md`` and
``results.json``. ``--device cpu`` runs the same code in a small version on the tape backend: that proves the
script, not the product.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from tests.gpu import backends, swaps
from tests.gpu.plan import Context, make_context
from tests.gpu.report import Row, Section, machine, markdown, write

CHECKS: dict[str, Callable[[Context], list[Row]]] = {
    "backend conformance": backends.conformance,
    "replay against eager": backends.replay,
    "capture while another generation replays": backends.capture_beside,
    "swap between equal weights": swaps.same_weights,
    "copy against exchange": swaps.commit_modes,
    "many swaps under load": swaps.many_swaps,
    # Last: it may taint the process.
    "a failed capture": backends.failed_capture,
}


def main() -> int:
    """Run all checks; returns 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", nargs="?", type=Path, help="where results go; docs/gpu on a GPU, nowhere on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu proves the script alone")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as scratch:
        context = make_context(device, Path(scratch))
        sections = [_run(name, check, context) for name, check in CHECKS.items()]
    facts = machine(device)
    folder = options.folder or (Path("docs/gpu") if device.type == "cuda" else None)
    sys.stdout.write(markdown(facts, sections) + "\n")
    if folder is not None:
        write(folder, facts, sections)
    return 0 if all(section.passed for section in sections) else 1


def _run(name: str, check: Callable[[Context], list[Row]], context: Context) -> Section:
    sys.stderr.write(f"{name} ...\n")
    section, began = Section(name), time.monotonic()
    try:
        section.rows = check(context)
    except Exception as error:
        # One check that breaks must not take the others' figures with it.
        traceback.print_exc()
        section.error = f"{type(error).__name__}: {error}"
    section.took_s = time.monotonic() - began
    return section


if __name__ == "__main__":
    sys.exit(main())
