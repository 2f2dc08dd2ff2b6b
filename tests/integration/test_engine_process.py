"""A real engine process over its two sockets: serving, swapping, refusing, ending."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from engine.attach import send_data_socket
from engine.build import BuildManifest, RuntimeOptions, seal_build
from engine.framing import Connection
from engine.process_testing import WAIT_S, EngineProcess, prompt
from engine.testing import random_weights, tiny_build, tiny_config
from engine.wire import Arm, Cancel, Exchanged, Inspect, Release, Sampling, Stage, Stats, Stop, Submit, Swap, Tokens

# The context leaves room for answers that are still running when a second swap comes.
RUNTIME = RuntimeOptions(batch_sizes=(1, 2, 4), contexts=(32, 256), prefill_chunk_tokens=8)
LONG_ANSWER_TOKENS = 230


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``same`` has the weights of ``base``; ``other`` does not."""
    root = tmp_path_factory.mktemp("builds")
    for name, seed in (("base", 1), ("same", 1), ("other", 2)):
        tiny_build(root / name, seed=seed, version="1.0.0", extra_files={"name": name.encode()}, runtime=RUNTIME)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineProcess]:
    engine = EngineProcess()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: EngineProcess, builds: dict[str, Path]) -> EngineProcess:
    """The module's engine, serving ``base`` and nothing else, idle."""
    states = shared.ok(Stats())["generations"]
    for generation in states:
        if generation["state"] == "READY":
            shared.ok(Release(generation["generation"]))
    shared.active = shared.ok(Stats())["active_generation"]
    shared.serve(builds["base"])
    return shared


def test_same_weights_swap_is_token_identical(engine: EngineProcess, builds: dict[str, Path]) -> None:
    expected = [engine.run(prompt(i), LONG_ANSWER_TOKENS) for i in range(8)]
    kv_bytes = engine.ok(Stats())["kv_bytes"]
    number, staged = engine.stage(builds["same"])
    assert staged.data["mode"] == "carry"
    assert engine.ok(Stats())["kv_bytes"] == kv_bytes, "a carrying generation has no arena of its own"
    requests = engine.start(8, length=LONG_ANSWER_TOKENS)
    swapped = engine.ok(Swap(number))
    assert (swapped["mode"], swapped["running"]) == ("carry", 4)
    assert [engine.finish(request) for request in requests] == ["length"] * 8
    assert [engine.answer(request) for request in requests] == expected
    stats = engine.ok(Stats())
    assert (stats["active_generation"], stats["host_state"]) == (number, "ACTIVE")
    # The message order is the order of generations.
    exchange = engine.front.messages.index(Exchanged(number))
    assert all(
        (message.generation == number) == (position > exchange)
        for position, message in enumerate(engine.front.messages)
        if isinstance(message, Tokens) and position > exchange - 20
    )


def test_staging_does_not_disturb_running_sequences(engine: EngineProcess, builds: dict[str, Path]) -> None:
    expected = [engine.run(prompt(i)) for i in range(4)]
    stop = threading.Event()
    answers: list[tuple[int, list[int]]] = []

    def load(i: int) -> None:
        while not stop.is_set():
            answers.append((i, engine.run(prompt(i))))

    threads = [threading.Thread(target=load, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for build in ("same", "other"):
        number, reply = engine.stage(builds[build])
        assert reply.ok
        engine.ok(Release(number))
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(answers) > 4
    assert all(answer == expected[i] for i, answer in answers)


@pytest.mark.parametrize("rollback", [False, True])
def test_recomputed_continuation_is_the_new_builds_own(
    engine: EngineProcess, builds: dict[str, Path], rollback: bool
) -> None:
    old = engine.active
    number, staged = engine.stage(builds["other"])
    assert staged.data["mode"] == "recompute"
    # The short one leaves a hole that KV is moved into, in both arenas, before the rollback.
    lengths = [LONG_ANSWER_TOKENS, 40, LONG_ANSWER_TOKENS, LONG_ANSWER_TOKENS, 30, 40]
    requests = [engine.submit(prompt(i), length) for i, length in enumerate(lengths)]
    engine.front.wait(lambda: len(engine.answer(requests[3])) >= 4)
    swapped = engine.ok(Swap(number))
    assert swapped["mode"] == "recompute"
    assert swapped["ahead_steps"] > 0
    if rollback:
        assert engine.finish(requests[1]) == "length"
        back = engine.ok(Swap(old))
        assert (back["mode"], back["running"]) == ("recompute", 4)
        assert engine.ok(Stats())["host_state"] == "STANDBY"
    for request in requests:
        assert engine.finish(request) == "length"
    _every_exchange_was_seamless(engine, number, swapped["running"])
    last = old if rollback else number
    for i, request in enumerate(requests):
        events = engine.events(request)
        before = [token for _, token, _ in events[: _first_of_last(events, last)]]
        after = [token for _, token, _ in events[len(before) :]]
        if after:
            assert engine.run(prompt(i) + before, lengths[i] - len(before)) == after


def _every_exchange_was_seamless(engine: EngineProcess, number: int, running: int) -> None:
    """The step after the exchange served every sequence that ran: nobody waited for a prefill."""
    following = engine.front.messages[engine.front.messages.index(Exchanged(number)) + 1]
    assert isinstance(following, Tokens)
    assert len(following.tokens) == running


def _first_of_last(events: list[tuple[int, int, str | None]], last: int) -> int:
    """Where the final run of tokens of generation ``last`` begins."""
    position = len(events)
    while position and events[position - 1][0] == last:
        position -= 1
    return position


def test_seeded_sampling_does_not_depend_on_the_batch(engine: EngineProcess) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 42}
    alone = engine.run(prompt(0), **options)
    crowd = [engine.submit(prompt(i)) for i in range(1, 4)]
    assert engine.run(prompt(0), **options) == alone
    assert [engine.finish(request) for request in crowd] == ["length"] * 3
    assert engine.run(prompt(0), temperature=0.8) != engine.run(prompt(0), temperature=0.8)


def test_requests_that_cannot_run_end_at_once(engine: EngineProcess) -> None:
    assert engine.finish(engine.submit([])) == "error"
    assert engine.finish(engine.submit([256])) == "error"
    assert engine.finish(engine.submit([1] * 256)) == "length"
    assert engine.finish(engine.submit([1], tokens_max=0)) == "length"
    assert len(engine.run([1] * 252, tokens_max=50)) == 4


def test_stop_tokens_end_without_being_emitted(engine: EngineProcess) -> None:
    answer = engine.run(prompt(3))
    stop = answer[5]
    request = engine.submit(prompt(3), stop=(stop,))
    assert engine.finish(request) == "stop"
    assert engine.answer(request) == answer[: answer.index(stop)]


def test_cancel_ends_running_and_waiting_requests_alike(engine: EngineProcess) -> None:
    expected = engine.run(prompt(1))
    requests = engine.start(6, tokens=2)
    for request in (requests[0], requests[5]):
        engine.front.connection.send(Cancel(request))
        assert engine.finish(request) == "cancelled"
    assert engine.finish(requests[1]) == "length"
    assert engine.answer(requests[1]) == expected
    engine.front.connection.send(Cancel(10**6))
    assert engine.run(prompt(1)) == expected


def test_drain_waits_for_the_running_and_holds_the_new(engine: EngineProcess, builds: dict[str, Path]) -> None:
    old, (number, _) = engine.active, engine.stage(builds["same"])
    requests = engine.start(4, length=LONG_ANSWER_TOKENS)
    engine.send(Swap(number, "drain"))
    late = engine.submit(prompt(9))
    assert engine.reply().data["mode"] == "drain"
    assert {generation for request in requests for generation, *_ in engine.events(request)} == {old}
    assert engine.finish(late) == "length"
    assert {generation for generation, *_ in engine.events(late)} == {number}


def test_a_smaller_build_waits_until_the_running_sequences_fit(engine: EngineProcess, tmp_path: Path) -> None:
    small = RuntimeOptions(batch_sizes=(1, 2), contexts=(64,), prefill_chunk_tokens=8)
    tiny_build(tmp_path / "small", seed=2, version="1.0.0", runtime=small)
    old, (number, _) = engine.active, engine.stage(tmp_path / "small")
    long = engine.start(3, length=LONG_ANSWER_TOKENS)
    short = [engine.submit(prompt(i)) for i in range(12)]
    assert engine.ok(Swap(number))["running"] <= 2
    assert [engine.finish(request) for request in (*long, *short)] == ["length"] * 15
    assert {generation for request in long for generation, *_ in engine.events(request)} == {old}
    # Free slots were not filled again beyond what the new build holds, so the last ones ran on it alone.
    assert {generation for generation, *_ in engine.events(short[-1])} == {number}


def test_a_missed_boundary_leaves_the_generation_ready(engine: EngineProcess, builds: dict[str, Path]) -> None:
    old, (number, _) = engine.active, engine.stage(builds["other"])
    requests = engine.start(4, length=LONG_ANSWER_TOKENS)
    assert engine.call(Swap(number, "drain", deadline_s=0.0)).code == "boundary_missed"
    stats = engine.ok(Stats())
    assert (stats["active_generation"], stats["host_state"]) == (old, "STANDBY")
    assert [engine.finish(request) for request in requests] == ["length"] * 4
    assert engine.ok(Swap(number))["mode"] == "recompute"


def test_a_second_swap_is_refused_while_one_is_pending(engine: EngineProcess, builds: dict[str, Path]) -> None:
    number, _ = engine.stage(builds["same"])
    engine.start(4, length=LONG_ANSWER_TOKENS)
    for _ in range(2):
        engine.send(Swap(number, "drain"))
    assert engine.reply().ok
    assert engine.reply().code == "swap_pending"


def test_refusals_leave_serving_untouched(engine: EngineProcess, builds: dict[str, Path], tmp_path: Path) -> None:
    expected = engine.run(prompt(0))
    requests = engine.start(1)
    damaged = tiny_build(tmp_path / "damaged", seed=3, version="1.0.0", runtime=RUNTIME)
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\0" * 1000)
    number, reply = engine.stage(tmp_path / "damaged")
    assert (reply.code, "safetensors" in reply.what) == ("stage_failed", True)
    assert engine.stage(builds["other"], digest=damaged.digest)[1].code == "stage_failed"
    assert engine.call(Swap(number)).code == "not_ready"
    assert engine.call(Inspect(number)).code == "not_ready"
    assert engine.call(Release(engine.active)).code == "generation_in_use"
    assert engine.call(Swap(engine.active)).code == "already_active"
    number, reply = engine.stage(builds["other"])
    assert reply.ok
    assert engine.stage(builds["same"])[1].code == "resident_full"
    assert engine.call(Swap(number, "carry")).code == "carry_refused"
    assert engine.finish(requests[0]) == "length"
    assert engine.answer(requests[0]) == expected


def test_release_unmaps_the_build(engine: EngineProcess, builds: dict[str, Path]) -> None:
    maps = Path(f"/proc/{engine.process.pid}/maps")
    weights = str(builds["other"] / "model.safetensors")
    number, _ = engine.stage(builds["other"])
    assert weights in maps.read_text()
    kv_bytes = engine.ok(Stats())["kv_bytes"]
    engine.ok(Release(number))
    assert weights not in maps.read_text()
    assert engine.ok(Stats())["kv_bytes"] == kv_bytes, "one KV pool serves every generation of its layout"


def test_inspect_digests_every_tensor_and_arm_answers(engine: EngineProcess) -> None:
    tensors = engine.ok(Inspect(engine.active))["tensors"]
    assert tensors["lm_head.weight"] == {"alias_of": "model.embed_tokens.weight"}
    assert tensors["model.norm.weight"]["shape"] == [64]
    assert tensors["model.norm.weight"]["dtype"] == "float32"
    buffers = [entry for entry in tensors.values() if entry.get("derived")]
    assert len(tensors) - len(buffers) == len(random_weights(tiny_config(), seed=1)) + 1
    assert len({entry["digest"] for entry in tensors.values() if "digest" in entry}) == len(tensors) - 1
    assert engine.ok(Arm()) == {"armed": True}


def test_non_finite_logits_end_one_request_and_harm_no_other(engine: EngineProcess, tmp_path: Path) -> None:
    config = tiny_config(tied=False)
    weights = random_weights(config, seed=4)
    poison = 255  # never met by the golden prompt or the answers below
    weights["model.embed_tokens.weight"][poison] = float("inf")
    weights["lm_head.weight"][poison] = 0
    (tmp_path / "b").mkdir()
    save_file(weights, tmp_path / "b" / "model.safetensors")
    (tmp_path / "b" / "rp.py").write_text("")
    seal_build(tmp_path / "b", name="t", version="1.0.0", model=config, request_path="rp.py", runtime=RUNTIME)
    engine.serve(tmp_path / "b")
    expected = engine.run(prompt(1))
    healthy = [engine.submit(prompt(1)), engine.submit(prompt(1))]
    sick = engine.submit([3, poison, 5] * 10)
    assert engine.finish(sick) == "error"
    assert engine.answer(sick) == []
    # Successors in the poisoned slot are sound.
    healthy += [engine.submit(prompt(1)) for _ in range(4)]
    for request in healthy:
        assert engine.finish(request) == "length"
        assert engine.answer(request) == expected
    assert engine.ok(Stats())["nonfinite_rows"] == 1


def test_stats_are_complete(engine: EngineProcess) -> None:
    engine.run(prompt(0))
    stats = engine.ok(Stats())
    assert stats["step_ms_max"] >= stats["step_ms_p99"] >= stats["step_ms_p50"] > 0
    assert (stats["running"], stats["waiting"], stats["backend"]) == (0, 0, "tape" if not _cuda() else "cuda")
    assert stats["weight_bytes"] > 0
    assert stats["active_digest"].startswith("sha256:")
    assert [entry["state"] for entry in stats["generations"]].count("ACTIVE") == 1


def _cuda() -> bool:
    return torch.cuda.is_available()


def wait_until_idle(engine: EngineProcess) -> dict[str, Any]:
    give_up_s = time.monotonic() + WAIT_S
    while (stats := engine.stats())["running"] or stats["waiting"]:
        assert time.monotonic() < give_up_s
    return stats


def test_a_lost_front_cancels_its_requests_and_keeps_the_engine(engine: EngineProcess) -> None:
    before = engine.stats()["requests_cancelled"]
    engine.start(4, length=LONG_ANSWER_TOKENS)
    engine.front.close()
    assert wait_until_idle(engine)["requests_cancelled"] > before
    engine.process.send_signal(signal.SIGUSR1)  # what the kernel sends when a parent thread ends: harmless
    assert engine.stats()["active_generation"] == engine.active
    engine.attach()


def test_a_new_front_replaces_the_old_one_and_is_told_what_serves(
    engine: EngineProcess, builds: dict[str, Path]
) -> None:
    expected = engine.run(prompt(0))
    number, _ = engine.stage(builds["same"])
    failed = engine.stats()["requests_failed"]
    for _ in range(3):
        old = engine.front
        engine.start(6, length=LONG_ANSWER_TOKENS)
        engine.attach()
        requests = [engine.submit(prompt(0)) for _ in range(4)]
        assert [engine.finish(request) for request in requests] == ["length"] * 4
        assert all(engine.answer(request) == expected for request in requests)
        assert engine.front.messages[0] == Exchanged(engine.active)
        old.wait(lambda: old.lost)  # noqa: B023 - called within the iteration
        old.close()
    # The swap that comes after goes to the newest front alone.
    engine.ok(Swap(number))
    assert engine.exchanges == [engine.active, number]
    assert wait_until_idle(engine)["requests_failed"] == failed


def test_a_front_that_does_not_read_is_let_go_when_the_next_one_comes(engine: EngineProcess) -> None:
    """The serve loop waits for the stuck front's buffer; the new front frees it."""
    expected, cancelled = engine.run(prompt(0)), engine.stats()["requests_cancelled"]
    stuck, there = socket.socketpair()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with stuck, there:
        send_data_socket(engine.attach_socket, there)
        connection = Connection(stuck)
        for request in range(10**6, 10**6 + 64):
            connection.send(Submit(request, tuple(prompt(request)), LONG_ANSWER_TOKENS, Sampling()))
        # It is stuck when its counters stand still although requests run.
        give_up_s, before = time.monotonic() + WAIT_S, -1
        while (stats := engine.stats())["steps"] != before or not stats["running"]:
            assert time.monotonic() < give_up_s
            before = stats["steps"]
            time.sleep(0.3)
        engine.attach()
        assert engine.run(prompt(0)) == expected
    assert wait_until_idle(engine)["requests_cancelled"] > cancelled


def test_fronts_leave_no_descriptor_and_no_thread_behind(engine: EngineProcess) -> None:
    def held() -> tuple[int, int]:
        process = Path(f"/proc/{engine.process.pid}")
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

    engine.run(prompt(0))
    before = held()
    for _ in range(10):
        engine.front.close()
        engine.attach()
        engine.run(prompt(0))
    assert held() == before


@pytest.fixture
def own(builds: dict[str, Path]) -> Iterator[EngineProcess]:
    """An engine for a test that ends it."""
    engine = EngineProcess()
    engine.serve(builds["base"])
    yield engine
    engine.close()


def test_end_of_the_control_socket_ends_the_process(own: EngineProcess) -> None:
    own.start(4)
    own.control.shutdown()
    assert own.process.wait(WAIT_S) == 0


def test_stop_is_answered_in_order_even_while_staging(own: EngineProcess, builds: dict[str, Path]) -> None:
    manifest = msgspec.json.decode((builds["other"] / "build.json").read_bytes(), type=BuildManifest)
    own.send(Stage(9, str(builds["other"]), manifest.digest))
    own.send(Stop())
    assert own.reply().code in ("", "abandoned", "stopping")
    assert own.reply().ok
    assert own.process.wait(WAIT_S) == 0
