"""A hundred swaps of one engine process under load: nothing fails, nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.build import RuntimeOptions
from engine.process_testing import WAIT_S, EngineProcess, prompt
from engine.testing import tiny_build
from engine.wire import Release, Swap

# Few buckets: what is measured is what a swap leaves behind, and each one captures all of them.
_RUNTIME = RuntimeOptions(batch_sizes=(1, 2), contexts=(64,), prefill_chunk_tokens=8)
_STREAMS = 2
# Requests run through every swap all the same; without it they take the core that staging waits for.
_PAUSE_S = 0.02
_HOTFIXES = 34
_SWAPS_EACH = 3
_WARM_UP_HOTFIXES = 7
_GROWTH_MAX = 0.01


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two builds of different weights."""
    root = tmp_path_factory.mktemp("builds")
    for name, seed in (("a", 1), ("b", 2)):
        tiny_build(root / name, seed=seed, version="1.0.0", layers=1, runtime=_RUNTIME)
    return [root / "a", root / "b"]


@contextmanager
def load(engine: EngineProcess) -> Iterator[list[str | None]]:
    """Streams of requests; yields how each one ended."""
    ends: list[str | None] = []
    stop = threading.Event()

    def stream(number: int) -> None:
        while not stop.wait(_PAUSE_S):
            ends.append(engine.finish(engine.submit(prompt(number))))

    threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)


def held(pid: int) -> tuple[int, int, int]:
    """Anonymous memory in KiB, descriptors and threads of a process."""
    process = Path(f"/proc/{pid}")
    lines = (process / "smaps_rollup").read_text().splitlines()
    anonymous_kib = next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return anonymous_kib, len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))


def test_a_hundred_swaps_leave_nothing_behind(builds: list[Path]) -> None:
    """Each hotfix is staged, swapped in, rolled back, swapped in again and committed."""
    with EngineProcess() as engine:
        old = engine.serve(builds[0])
        with load(engine) as ends:
            for hotfix in range(_HOTFIXES):
                if hotfix == _WARM_UP_HOTFIXES:
                    before = held(engine.process.pid)
                new, reply = engine.stage(builds[(hotfix + 1) % 2])
                assert reply.ok, reply
                for target in (new, old, new):
                    engine.ok(Swap(target))
                engine.ok(Release(old))
                old = new
            after = held(engine.process.pid)
        stats = engine.stats()
    assert stats["swaps"] == _HOTFIXES * _SWAPS_EACH
    assert set(ends) == {"length"}
    assert len(ends) > _HOTFIXES
    assert (stats["requests_failed"], stats["requests_cancelled"]) == (0, 0)
    assert after[0] <= before[0] * (1 + _GROWTH_MAX), f"{before[0]} KiB before, {after[0]} KiB after"
    assert after[1:] == before[1:]
