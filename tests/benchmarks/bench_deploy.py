"""The operator's way: ``patchctl deploy`` of a signed hotfix on a whole host, stager and all, under four streams."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from patchctl.demo.clients import StreamingClients
from patchctl.demo.commands import Shell
from patchctl.demo.measure import gaps_between, step_data, step_times_ms, step_window, swap_gaps
from patchctl.demo.scenario import hosting, release, write_policy
from patchctl.errors import PatchctlError
from patchctl.home import Home
from tests.benchmarks.bench_swap import STREAMS
from tests.benchmarks.context import Bench
from tests.benchmarks.figures import Figure, Report


def run(bench: Bench) -> Report:
    """One deployment; the swap section has the repeated ones."""
    home = Home(bench.folder)
    made, name = bench.demo
    shell = Shell(home.root, sys.stderr)
    with hosting(shell, made.folders["1.0.0"], write_policy(shell, home)) as url:
        clients = StreamingClients(url, name, STREAMS)
        clients.start()
        try:
            while len(clients.finished) < STREAMS:
                time.sleep(0.1)
            began_ns = time.time_ns()
            time.sleep(2 * bench.options.window_s)
            ended_ns = time.time_ns()
            release(shell, made, home, ("1.0.0", "1.0.1"), sequence=1, growth_max=4096)
            refusal = _deploy(shell, home.root / "hotfix-1.0.1.patch")
            (transaction,) = shell.run("history").data
        finally:
            clients.stop()
    baseline = gaps_between(clients.responses, began_ns, ended_ns)
    staging = gaps_between(clients.responses, *(step_window(transaction, "stage") or (0, 0)))
    swap = swap_gaps(clients.responses, transaction, "swap")
    failures = [response.failure for response in clients.responses if response.failure]
    return Report(
        [
            Figure("committed", 0 if refusal else 1, "", "deployments", 1, at_least=1.0),
            Figure("step p99 while staging", staging.p99_ms, "ms", "p99 before", baseline.p99_ms, at_most=1.3),
            Figure(
                "largest gap at the swap",
                math.nan if swap is None else swap.max_ms,
                "ms",
                "max(p99, 2 p50) before",
                max(baseline.p99_ms, 2 * baseline.p50_ms),
                at_most=1.0,
            ),
            Figure("failed or aborted", len(failures), "", "responses", len(clients.responses), at_most=0.0),
        ],
        {
            "refusal": refusal,
            "exchange_us": step_data(transaction, "swap").get("exchange_us"),
            "steps_ms": step_times_ms(transaction),
            "largest_gap_staging_ms": staging.max_ms,
            "failures": failures[:5],
        },
    )


def _deploy(shell: Shell, patch: Path) -> str:
    """Deploy; returns why it was not committed, or "". A deployment that went back has gaps to look at as well."""
    try:
        shell.run("deploy", str(patch))
    except PatchctlError as error:
        return error.why
    return ""
