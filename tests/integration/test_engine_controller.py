"""The controller on a real loop and real tiny builds: governed staging, reclaiming, probation, faults."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import BuildManifest, RuntimeOptions
from engine.controller import Controller
from engine.faults import Fault, FaultyBackend, faulty
from engine.governor import Memory
from engine.graphs.port import GraphBackend
from engine.graphs.tape import TapeBackend
from engine.loop import ServeLoop
from engine.testing import tiny_build
from engine.wire import (
    Control,
    Exchanged,
    Inspect,
    Reclaim,
    Release,
    Reply,
    Sampling,
    Stage,
    Stats,
    Submit,
    Swap,
    ToFront,
    Tokens,
)

WAIT_S = 60.0
GIB = 1 << 30
RUNTIME = RuntimeOptions(batch_sizes=(2,), contexts=(64,), prefill_chunk_tokens=8)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8)


class Engine:
    """A controller and its serve loop in this process, without sockets."""

    def __init__(self) -> None:
        self.memory = Memory(used_bytes=0, total_bytes=GIB)
        self.fault: Fault | None = None
        self.backend: GraphBackend | None = None
        self.messages: list[ToFront] = []
        self.changed = threading.Condition()
        self.loop = ServeLoop()
        self.controller = Controller(
            self.loop,
            device=torch.device("cpu"),
            arm=dict,
            digest_tensors=lambda arrays: {
                name: hashlib.sha256(array.data).hexdigest() for name, array in arrays.items()
            },
            make_backend=self.make_backend,
            read_memory=lambda: self.memory,
        )
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()
        self.loop.attach(self.receive).result(WAIT_S)
        self.requests = 0

    def make_backend(self, device: torch.device) -> GraphBackend:
        made: Callable[[torch.device], GraphBackend] = lambda _: TapeBackend()  # noqa: E731 - as the real one is
        self.backend = (made if self.fault is None else faulty(made, self.fault))(device)
        return self.backend

    def receive(self, message: ToFront) -> None:
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def call(self, message: Control) -> Reply:
        return self.controller.handle(message).result(WAIT_S)

    def ok(self, message: Control) -> dict[str, Any]:
        reply = self.call(message)
        assert reply.ok, reply
        return reply.data

    def stage(self, number: int, folder: Path, manifest: BuildManifest, mode: Any = "auto") -> Reply:
        return self.call(Stage(number, str(folder), manifest.digest, mode))

    def begin(self, tokens_max: int, prompt: tuple[int, ...] = PROMPT) -> int:
        self.requests += 1
        self.loop.post(Submit(self.requests, prompt, tokens_max, Sampling()))
        return self.requests

    def tokens(self, request: int) -> list[tuple[int, int, str | None]]:
        return [
            (message.generation, token.token, token.finish)
            for message in tuple(self.messages)
            if isinstance(message, Tokens)
            for token in message.tokens
            if token.request == request
        ]

    def finish(self, request: int) -> list[int]:
        self.wait(lambda: any(finish for *_, finish in self.tokens(request)))
        assert self.tokens(request)[-1][2] == "length", self.tokens(request)
        return [token for _, token, _ in self.tokens(request)]

    def answer(self, tokens_max: int = 12, prompt: tuple[int, ...] = PROMPT) -> list[int]:
        return self.finish(self.begin(tokens_max, prompt))

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), self.messages[-3:]

    def wait_for_stats(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        give_up_s = time.monotonic() + WAIT_S
        while not condition(stats := self.ok(Stats())):
            assert time.monotonic() < give_up_s, stats
            time.sleep(0.005)
        return stats

    def states(self) -> dict[int, str]:
        return {one["generation"]: one["state"] for one in self.ok(Stats())["generations"]}

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(WAIT_S)
        self.controller.close()


Builds = dict[str, tuple[Path, BuildManifest]]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """``same`` has the weights of ``base``; ``other`` does not."""
    root = tmp_path_factory.mktemp("builds")
    seeds = {"base": 1, "same": 1, "other": 2}
    return {
        name: (
            root / name,
            tiny_build(root / name, seed=seed, version="1.0.0", extra_files={"name": name.encode()}, runtime=RUNTIME),
        )
        for name, seed in seeds.items()
    }


@pytest.fixture
def engine(builds: Builds) -> Iterator[Engine]:
    """Serves ``base`` as generation 1."""
    made = Engine()
    assert made.stage(1, *builds["base"]).ok
    yield made
    made.close()


def test_swap_rollback_and_commit(engine: Engine, builds: Builds) -> None:
    expected = engine.answer()
    assert engine.stage(2, *builds["other"]).data["commit_mode"] == "exchange"
    assert engine.ok(Swap(2))["mode"] == "recompute"
    stats = engine.ok(Stats())
    assert (stats["host_state"], stats["probation"], stats["committed_generation"]) == ("ACTIVE", True, 1)
    other = engine.answer()
    assert other != expected
    engine.ok(Swap(1))
    assert engine.answer() == expected
    assert engine.ok(Stats())["probation"] is False
    engine.ok(Swap(2))
    engine.ok(Release(1))
    stats = engine.ok(Stats())
    assert (stats["host_state"], stats["probation"], stats["committed_generation"]) == ("STANDBY", False, 2)
    assert engine.states() == {1: "FREED", 2: "ACTIVE"}
    assert engine.answer() == other


def test_a_build_that_does_not_fit_is_refused_with_the_arithmetic(engine: Engine, builds: Builds) -> None:
    expected = engine.answer()
    engine.memory = Memory(used_bytes=900, total_bytes=1000)
    reply = engine.stage(2, *builds["other"])
    assert reply.code == "memory_refused"
    assert "used 900 B + weights" in reply.what
    assert "limit 850 B (85 % of 1000 B)" in reply.what
    stats = engine.ok(Stats())
    assert (stats["stage_decision"], stats["stage_arithmetic"]) == ("refused", reply.what)
    assert engine.states() == {1: "ACTIVE", 2: "FAILED"}
    assert engine.answer() == expected
    engine.memory = Memory(used_bytes=0, total_bytes=GIB)
    assert engine.stage(2, *builds["other"]).ok, "the number is free again"


def test_prefixes_are_given_up_for_a_new_build(engine: Engine, builds: Builds) -> None:
    engine.answer()
    idle_bytes = engine.ok(Stats())["kv_blocks_idle"] * _pool(engine).block_bytes
    assert idle_bytes > 0
    need_bytes = engine.stage(2, *builds["other"]).data
    assert need_bytes["memory"].endswith("(85 % of 1.000 GiB)")
    engine.ok(Release(2))
    peak_bytes = engine.ok(Stats())["stage_peak_bytes"]
    # Exactly as much too little as the prefixes hold; freeing them is seen at the next look.
    total_bytes = 4 * GIB
    limit_bytes = total_bytes * 85 // 100
    used_bytes = limit_bytes - peak_bytes + idle_bytes

    def look() -> Memory:
        freed = engine.ok(Stats())["kv_blocks_idle"] == 0 if looked else False
        looked.append(freed)
        return Memory(used_bytes - idle_bytes if freed else used_bytes, total_bytes)

    looked: list[bool] = []
    engine.controller._governor.read_memory = look
    assert engine.stage(3, *builds["other"]).ok
    assert looked == [False, True]
    assert engine.ok(Stats())["reclaim_runs"] == 1


def test_copy_mode_swaps_in_place_and_back(engine: Engine, builds: Builds) -> None:
    expected = engine.answer()
    staged = engine.stage(2, *builds["other"], "copy")
    assert staged.data["commit_mode"] == "copy", staged
    assert engine.answer() == expected
    engine.ok(Swap(2))
    other = engine.answer()
    assert other != expected
    engine.ok(Swap(1))
    assert engine.answer() == expected
    engine.ok(Swap(2))
    engine.ok(Release(1))
    assert engine.answer() == other
    modes = {one["generation"]: one["commit_mode"] for one in engine.ok(Stats())["generations"]}
    assert modes == {1: "", 2: "copy"}


def test_the_first_build_cannot_be_a_copy(builds: Builds) -> None:
    engine = Engine()
    try:
        assert engine.stage(1, *builds["base"], "copy").code == "memory_refused"
        assert engine.stage(1, *builds["base"], "auto").ok
    finally:
        engine.close()


def _pool(engine: Engine) -> Any:
    active = engine.loop.active
    assert active is not None
    return active.pool  # type: ignore[attr-defined]


def test_reclaim_now_gives_prefixes_back(engine: Engine) -> None:
    expected = engine.answer()
    assert engine.ok(Stats())["kv_blocks_idle"] > 0
    data = engine.ok(Reclaim(now=True))
    assert (data["freed_bytes"] > 0, data["reclaim_runs"], data["reclaim_policy"]) == (True, 1, "explicit")
    assert engine.ok(Stats())["kv_blocks_idle"] == 0
    assert engine.answer() == expected


def test_the_threshold_policy_acts_from_the_step(engine: Engine) -> None:
    engine.answer(prompt=PROMPT[::-1])
    assert engine.call(Reclaim(policy="threshold", high=0.5, low=0.6)).code == "reclaim_refused"
    engine.memory = Memory(used_bytes=GIB * 9 // 10, total_bytes=GIB)
    engine.answer(30)
    assert engine.ok(Stats())["reclaim_runs"] == 0, "explicit until told otherwise"
    assert engine.ok(Reclaim(policy="threshold", high=0.85, low=0.75))["reclaim_runs"] == 0
    engine.answer(30)
    stats = engine.wait_for_stats(lambda stats: stats["reclaim_runs"] > 0)
    assert stats["reclaim_policy"] == "threshold"
    assert stats["reclaim_freed_bytes"] > 0


def test_a_release_while_staging_abandons_it(engine: Engine, builds: Builds) -> None:
    folder, manifest = builds["other"]
    staging = engine.controller.handle(Stage(2, str(folder), manifest.digest))
    released = engine.controller.handle(Release(2))
    assert (staging.result(WAIT_S).code, released.result(WAIT_S).data) == ("abandoned", {"abandoned": True})
    assert engine.states() == {1: "ACTIVE", 2: "FREED"}
    assert engine.stage(2, folder, manifest).ok


def test_inspecting_names_every_tensor(engine: Engine) -> None:
    tensors = engine.ok(Inspect(1))["tensors"]
    assert tensors["lm_head.weight"] == {"alias_of": "model.embed_tokens.weight"}
    assert tensors["model.norm.weight"]["shape"] == [64]
    assert engine.call(Inspect(9)).code == "not_ready"


STAGING_FAULTS = [fault for fault in Fault if fault not in (Fault.NOT_FINITE, Fault.EXCHANGE)]


def test_a_fault_at_each_state_of_staging_changes_nothing(engine: Engine, builds: Builds, tmp_path: Path) -> None:
    expected = engine.answer()
    # Builds that no other test maps.
    folder, damaged = tmp_path / "new", tmp_path / "damaged"
    manifest = tiny_build(folder, seed=4, version="1.0.0", runtime=RUNTIME)
    damaged_manifest = tiny_build(damaged, seed=5, version="1.0.0", runtime=RUNTIME)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-4000])

    def attempt(fault: Fault | None, where: Path, digest: str, words: str) -> None:
        running = engine.begin(40)
        engine.fault = fault
        reply = engine.call(Stage(2, str(where), digest))
        engine.fault = None
        assert (reply.code, words in reply.what) == ("stage_failed", True), reply
        assert engine.states() == {1: "ACTIVE", 2: "FAILED"}
        engine.finish(running)
        assert engine.answer() == expected

    before = _threads_and_fds()
    attempt(None, damaged, damaged_manifest.digest, "safetensors")
    attempt(None, folder, damaged_manifest.digest, "expected")
    words = {Fault.WRONG_WARM_UP: "does not reproduce", Fault.GOLDEN: "golden tokens"}
    for fault in STAGING_FAULTS:
        attempt(fault, folder, manifest.digest, words.get(fault, f"injected: {fault}"))
    assert _threads_and_fds() == before
    # Nothing keeps the failed ones' memory: no mapping of their weights is left.
    mapped = Path("/proc/self/maps").read_text()
    assert str(builds["base"][0] / "model.safetensors") in mapped
    assert str(folder / "model.safetensors") not in mapped
    assert str(damaged / "model.safetensors") not in mapped
    assert engine.stage(2, folder, manifest).ok


def _threads_and_fds() -> tuple[int, int]:
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("fault", [Fault.NOT_FINITE, Fault.EXCHANGE])
def test_a_new_generation_that_cannot_go_on_is_replaced_at_once(engine: Engine, builds: Builds, fault: Fault) -> None:
    expected = engine.answer(40)
    engine.fault = fault
    assert engine.stage(2, *builds["same"]).ok
    running = [engine.begin(40) for _ in range(2)]
    engine.wait(lambda: len(engine.tokens(running[0])) > 3)
    swapped = engine.controller.handle(Swap(2))
    assert isinstance(engine.backend, FaultyBackend)
    engine.backend.armed = True
    assert swapped.result(WAIT_S).ok
    assert [engine.finish(request) for request in running] == [expected] * 2, "no client can tell"
    stats = engine.wait_for_stats(lambda stats: stats["active_generation"] == 1)
    assert (stats["host_state"], stats["probation"], stats["fallbacks"]) == ("STANDBY", False, 1)
    assert [message for message in engine.messages if isinstance(message, Exchanged)][-1] == Exchanged(1)
    breach = {one["generation"]: one["breach"] for one in stats["generations"]}[2]
    assert ("not finite" if fault is Fault.NOT_FINITE else "injected") in breach
    # The agent's rollback finds it done; the bad one never serves again, and goes.
    assert engine.ok(Swap(1))["mode"] == "fallback"
    assert engine.call(Swap(2)).code == "breached"
    engine.ok(Release(2))
    engine.fault = None
    assert engine.stage(2, *builds["same"]).ok
    assert engine.ok(Swap(2))["mode"] == "carry"


def test_a_slow_generation_is_exchanged_back_by_itself(engine: Engine, builds: Builds) -> None:
    before = engine.answer(40)
    while engine.ok(Stats())["steps"] < 200:
        engine.answer(40)
    assert engine.stage(2, *builds["same"]).ok
    engine.ok(Swap(2))
    slow = engine.loop.active
    assert slow is not None
    _make_slow(slow, 0.03)
    running = engine.begin(40), engine.begin(40)
    answers = [engine.finish(request) for request in running]
    while engine.ok(Stats())["active_generation"] == 2:
        answers.append(engine.answer(40))
    assert answers == [before] * len(answers)
    stats = engine.ok(Stats())
    assert stats["probation_breach"].startswith("step_latency: ")
    assert (stats["active_generation"], stats["host_state"]) == (1, "STANDBY")
    assert engine.ok(Swap(1))["mode"] == "fallback"


def _make_slow(generation: Any, seconds: float) -> None:
    """Every replay takes longer, as a badly compiled kernel would make it."""
    for bucket, real in list(generation.graphs.execs.items()):
        generation.graphs.execs[bucket] = _Slow(real, seconds)


class _Slow:
    def __init__(self, real: Any, seconds: float) -> None:
        self._real = real
        self._seconds = seconds

    def replay(self) -> None:
        time.sleep(self._seconds)
        self._real.replay()

    def close(self) -> None:
        self._real.close()


def test_an_error_in_the_controller_is_an_answer(engine: Engine, builds: Builds, tmp_path: Path) -> None:
    assert engine.call(Stage(2, str(tmp_path / "nothing"), "sha256:00")).code == "stage_failed"
    assert engine.call(Release(7)).code == "not_ready"
    assert engine.call(Swap(7)).code == "not_ready"
    assert engine.call(Stage(1, str(builds["base"][0]), builds["base"][1].digest)).code == "generation_exists"
