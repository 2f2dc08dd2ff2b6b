"""``make bench``: what the product costs, beside what this machine can do, measured in the same run.

Prints a table and writes ``bench.json``. No limit is asserted: machines differ and are shared; read the ratios.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from patchctl.demo.builds import make_builds
from patchctl.demo.clients import StreamingClients
from patchctl.demo.commands import Shell
from patchctl.demo.measure import gaps_between, quantile, step_data, step_window, swap_gaps
from patchctl.demo.scenario import hosting, prepare_model, release, temporary_home, write_policy
from patchctl.home import Home
from patchctl.render.output import print_table

STREAM_WINDOW_S = 15.0
START_ROUNDS = 9

# Linears of one decode step, nothing else: the time no engine on this machine can go below.
LINEARS = """
import json, sys, time, torch
torch.set_num_threads(1); torch.set_grad_enabled(False)
hidden, ffn, kv, vocab, layers = map(int, sys.argv[1:6])
shapes = [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)] * layers + [(vocab, hidden)]
weights = [torch.randn(shape) for shape in shapes]
result = {}
for rows in (1, 4):
    inputs = {width: torch.randn(rows, width) for _, width in shapes}
    times = []
    for _ in range(9):
        began = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        times.append((time.perf_counter() - began) * 1e3)
    result[rows] = sorted(times)[len(times) // 2]
print(json.dumps(result))
"""


def linears_ms(config: dict[str, Any]) -> dict[str, float]:
    """Median milliseconds of one step's linears for 1 and 4 rows, float32, one thread."""
    kv = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    shape = (config["hidden_size"], config["intermediate_size"], kv, config["vocab_size"], config["num_hidden_layers"])
    argv = [sys.executable, "-P", "-c", LINEARS, *map(str, shape)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
    return dict(json.loads(done.stdout))


def start_ms(commands: dict[str, list[str]], environment: dict[str, str]) -> dict[str, float]:
    """Median wall milliseconds of each command, arms interleaved."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(START_ROUNDS):
        for name, argv in commands.items():
            began = time.perf_counter()
            subprocess.run(argv, env=environment, capture_output=True, check=True, timeout=60)
            times[name].append((time.perf_counter() - began) * 1e3)
    return {name: quantile(values, 0.5) for name, values in times.items()}


def imports_torch(argv: list[str], environment: dict[str, str]) -> bool:
    """Whether a command imports torch."""
    traced = {**environment, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(argv, env=traced, capture_output=True, text=True, check=True, timeout=60)
    return any(line.rpartition("|")[2].strip() == "torch" for line in done.stderr.splitlines())


def stream(url: str, model: str, count: int) -> tuple[StreamingClients, dict[str, float]]:
    """Tokens per second and gaps at ``count`` streams over a fixed window; the clients keep running."""
    clients = StreamingClients(url, model, count)
    clients.start()
    while len(clients.finished) < count:
        time.sleep(0.1)
    began = time.time_ns()
    time.sleep(STREAM_WINDOW_S)
    ended = time.time_ns()
    gaps = gaps_between(clients.responses, began, ended)
    tokens = sum(began <= at <= ended for response in clients.responses for at in response.arrivals_ns)
    return clients, {
        "tokens_per_s": tokens / ((ended - began) / 1e9),
        "step_p50_ms": gaps.p50_ms,
        "step_p99_ms": gaps.p99_ms,
    }


def bench(home: Home) -> dict[str, Any]:
    """Everything, in one home."""
    environment = {**os.environ, "PATCHCTL_HOME": str(home.root)}
    patchctl = [sys.executable, "-P", "-m", "patchctl"]
    model, name = prepare_model(None, lambda line: print(line, file=sys.stderr))
    builds = make_builds(model, name, home.root / "builds")
    shell = Shell(home.root, sys.stderr)
    limits = linears_ms(builds.manifests["1.0.0"].model)
    with hosting(shell, builds.folders["1.0.0"], write_policy(shell, home)) as url:
        starts = {
            "python -c pass": [sys.executable, "-P", "-c", "pass"],
            "patchctl --help": [*patchctl, "--help"],
            "patchctl status": [*patchctl, "status"],
        }
        start = start_ms(starts, environment)
        torch_free = not any(imports_torch(argv, environment) for argv in starts.values())
        single, one = stream(url, name, 1)
        single.stop()
        clients, four = stream(url, name, 4)
        release(shell, builds, home, ("1.0.0", "1.0.1"), sequence=1, growth_max=4096)
        done = shell.run("deploy", str(home.root / "hotfix-1.0.1.patch"))
        (transaction,) = shell.run("history").data
        clients.stop()
    staging = gaps_between(clients.responses, *(step_window(transaction, "stage") or (0, 0)))
    swap = swap_gaps(clients.responses, transaction, "swap")
    assert swap is not None
    return {
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "state": done.data["state"],
        "limit_linears_ms": limits,
        "streams_1": one,
        "streams_4": four,
        "staging": {"step_p50_ms": staging.p50_ms, "step_p99_ms": staging.p99_ms},
        "swap": {"largest_gap_ms": swap.max_ms, "exchange_us": step_data(transaction, "swap").get("exchange_us")},
        "start_ms": start,
        "start_without_torch": torch_free,
        "snapshots": _snapshots(),
    }


def _snapshots() -> Any:
    script = Path(__file__).with_name("bench_snapshots.py")
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def show(data: dict[str, Any]) -> None:
    """One line a figure: value, the limit it is compared with, ratio."""
    one, four, limit = data["streams_1"], data["streams_4"], data["limit_linears_ms"]
    allowed_ms = max(four["step_p99_ms"], 2 * four["step_p50_ms"])
    rows = [
        ("tokens/s, 1 stream", one["tokens_per_s"], "linears alone", 1e3 / limit["1"]),
        ("tokens/s, 4 streams", four["tokens_per_s"], "linears alone", 4e3 / limit["4"]),
        ("step p50 ms, 4 streams", four["step_p50_ms"], "linears alone", limit["4"]),
        ("step p99 ms, 4 streams", four["step_p99_ms"], "its p50", four["step_p50_ms"]),
        ("step p99 ms while staging", data["staging"]["step_p99_ms"], "p99 before", four["step_p99_ms"]),
        ("largest gap ms at the swap", data["swap"]["largest_gap_ms"], "max(p99, 2 x p50)", allowed_ms),
        ("patchctl --help ms", data["start_ms"]["patchctl --help"], "0.3 s", 300.0),
        ("patchctl status ms", data["start_ms"]["patchctl status"], "0.3 s", 300.0),
    ]
    print_table(
        ["FIGURE", "VALUE", "AGAINST", "VALUE", "RATIO"],
        [(name, f"{value:.1f}", against, f"{bar:.1f}", f"{value / bar:.2f}") for name, value, against, bar in rows],
    )
    print(f"exchange {data['swap']['exchange_us']:.1f} µs; start-up without torch: {data['start_without_torch']}")
    print(json.dumps(data["snapshots"]))


def main() -> None:
    """Run, print, and write ``bench.json``."""
    with temporary_home(keep=False, tell=print) as home:
        data = bench(home)
    Path("bench.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    show(data)


if __name__ == "__main__":
    main()
