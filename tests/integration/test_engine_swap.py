"""Swaps on real graphs and a real scheduler, turn by turn in this thread: what clients would read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.build import RuntimeOptions
from engine.errors import LoadError, SwapRefusedError
from engine.exchange import Policy
from engine.generation import Generation
from engine.graphs.port import Graph, GraphExec
from engine.graphs.result import UpdateResult
from engine.loop import ServeLoop
from engine.pending import PendingSwap, resolve_mode
from engine.servable import StepFacts, WayBack
from engine.stage import stage
from engine.swap import CommitMode
from engine.testing import TINY_RUNTIME, tiny_build, tiny_config
from engine.wire import Exchanged, Sampling, Submit, ToFront, Tokens

CPU = torch.device("cpu")
SEQUENCES = 32
RUNTIME = RuntimeOptions(batch_sizes=(8, SEQUENCES), contexts=(64, 128), prefill_chunk_tokens=64)
PROMPT_TOKENS, ANSWER_TOKENS = 20, 100
POLICIES: tuple[Policy, ...] = ("auto", "carry", "recompute", "drain")


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("builds")
    tiny_build(root / "a", seed=1, version="1.0.0", runtime=RUNTIME)
    tiny_build(root / "a2", seed=1, version="1.0.1", runtime=RUNTIME)
    tiny_build(root / "b", seed=2, version="1.1.0", runtime=RUNTIME)
    return root


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def staged(
    folder: Path, number: int, active: Generation | None = None, commit_mode: CommitMode = "exchange"
) -> Generation:
    from engine.build import read_manifest

    generation, _ = stage(
        number,
        folder,
        read_manifest(folder).digest,
        device=CPU,
        active=active,
        report=lambda _event, _buckets=(): None,
        checkpoint=lambda: None,
        commit_mode=commit_mode,
    )
    return generation


def prompt(request: int) -> tuple[int, ...]:
    """Requests 100, 200… apart have the same prompt."""
    request %= 100
    return tuple((request * 31 + position * 7 + 1) % 256 for position in range(PROMPT_TOKENS + request % 5))


class Serving:
    """A loop that is turned by hand, and what its front would have received."""

    def __init__(self, generation: Generation) -> None:
        self.loop = ServeLoop()
        self.answers: dict[int, list[int]] = {}
        self.by: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.exchanges: list[int] = []
        self.loop.attach(self.receive)
        self.loop.activate(generation)
        self.loop.turn()

    def receive(self, message: ToFront) -> None:
        if isinstance(message, Exchanged):
            self.exchanges.append(message.generation)
        elif isinstance(message, Tokens):
            assert message.generation == self.exchanges[-1]
            for token in message.tokens:
                if token.token >= 0:
                    self.answers.setdefault(token.request, []).append(token.token)
                    self.by.setdefault(token.request, []).append(message.generation)
                if token.finish is not None:
                    assert token.request not in self.finish
                    self.finish[token.request] = token.finish

    def submit(self, count: int = SEQUENCES, *, tokens_max: int = ANSWER_TOKENS, first: int = 0) -> None:
        for request in range(first, first + count):
            self.loop.post(Submit(request, prompt(request), tokens_max, Sampling()))

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()

    def until(self, done: Callable[[], bool], turns_max: int = 3000) -> None:
        for _ in range(turns_max):
            if done():
                return
            self.loop.turn()
        raise AssertionError(f"not done after {turns_max} turns")

    def finish_all(self) -> None:
        self.until(lambda: not self.loop.running and not self.loop.waiting)

    def swap(
        self, target: Generation, policy: Policy = "auto", *, hard_stop_after_s: float | None = None
    ) -> PendingSwap:
        active = self.loop.active
        assert isinstance(active, Generation)
        mode, ahead = resolve_mode(policy, active, target)
        now_s = time.monotonic()
        hard_stop_s = None if hard_stop_after_s is None else now_s + hard_stop_after_s
        pending = PendingSwap(target, mode, ahead, now_s, now_s + 600, hard_stop_s, lambda: None, lambda: None)
        self.loop.request_swap(pending)
        self.until(pending.reply.done)
        assert pending.reply.result().ok, pending.reply.result()
        return pending


def unswapped(folder: Path, count: int = SEQUENCES) -> dict[int, list[int]]:
    serving = Serving(staged(folder, 1))
    serving.submit(count)
    serving.finish_all()
    return serving.answers


@pytest.mark.parametrize("policy", POLICIES)
def test_same_weights_swap_is_token_identical_with_all_sequences_in_flight(builds: Path, policy: Policy) -> None:
    expected = unswapped(builds / "a")
    serving = Serving(first := staged(builds / "a", 1))
    serving.submit()
    serving.until(lambda: len(serving.answers) == SEQUENCES)
    serving.turns(5)
    second = staged(builds / "a2", 2, first)
    assert serving.loop.running == SEQUENCES
    data = serving.swap(second, policy).reply.result().data
    if policy != "drain":
        assert data["running"] == SEQUENCES
        assert all(set(by) == {1} for by in serving.by.values())
        # Both were level: the step after the exchange has a token for everybody.
        serving.turns(1)
        assert all(by[-2:] == [1, 2] for by in serving.by.values())
    serving.finish_all()
    assert serving.answers == expected
    assert set(serving.finish.values()) == {"length"}
    if policy != "drain":
        assert all(sorted(set(by)) == [1, 2] for by in serving.by.values())


def test_swaps_and_rollbacks_under_every_policy_in_turn_change_no_token(builds: Path) -> None:
    expected = unswapped(builds / "a")
    serving = Serving(first := staged(builds / "a", 1))
    second = staged(builds / "a2", 2, first)
    serving.submit()
    serving.until(lambda: len(serving.answers) == SEQUENCES)
    for number, policy in enumerate(("carry", "recompute", "recompute", "carry", "auto", "recompute")):
        serving.swap(second if number % 2 == 0 else first, policy)  # type: ignore[arg-type]
        serving.turns(2)
    serving.finish_all()
    assert serving.answers == expected


def test_recompute_equals_a_fresh_run_on_the_new_build(builds: Path) -> None:
    serving = Serving(first := staged(builds / "a", 1))
    second = staged(builds / "b", 2, first)
    assert second.pool is first.pool
    serving.submit()
    serving.until(lambda: len(serving.answers) == SEQUENCES)
    serving.turns(3)
    serving.swap(second)
    before = {request: len(answer) for request, answer in serving.answers.items()}
    serving.finish_all()
    # The same known tokens, given to the new build as a prompt, are continued in the same way.
    fresh = Serving(staged(builds / "b", 9))
    for request, answer in serving.answers.items():
        known = (*prompt(request), *answer[: before[request]])
        fresh.loop.post(Submit(request, known, ANSWER_TOKENS - before[request], Sampling()))
    fresh.finish_all()
    for request, answer in serving.answers.items():
        assert answer[before[request] :] == fresh.answers[request]


def test_rollback_after_recompute_equals_the_old_build_again(builds: Path) -> None:
    serving = Serving(first := staged(builds / "a", 1))
    second = staged(builds / "b", 2, first)
    serving.submit(12)
    serving.until(lambda: len(serving.answers) == 12)
    serving.swap(second)
    serving.turns(4)
    serving.swap(first)
    assert serving.loop.running == 12
    before = {request: len(answer) for request, answer in serving.answers.items()}
    serving.finish_all()
    fresh = Serving(staged(builds / "a", 9))
    for request, answer in serving.answers.items():
        known = (*prompt(request), *answer[: before[request]])
        fresh.loop.post(Submit(request, known, ANSWER_TOKENS - before[request], Sampling()))
    fresh.finish_all()
    assert {request: answer[before[request] :] for request, answer in serving.answers.items()} == fresh.answers


@pytest.mark.parametrize("policy", ["carry", "recompute", "drain"])
def test_no_new_request_hits_a_prefix_of_the_old_generation(builds: Path, policy: Policy) -> None:
    serving = Serving(first := staged(builds / "a", 1))
    second = staged(builds / "a2", 2, first)
    serving.submit(4, tokens_max=1)
    serving.finish_all()
    serving.submit(4, first=50)
    serving.turns(10)
    serving.swap(second, policy)
    serving.finish_all()
    hits = serving.loop.schedule.counters.prefix_hit_tokens
    serving.submit(4, first=100, tokens_max=1)
    serving.finish_all()
    assert serving.loop.schedule.counters.prefix_hit_tokens == hits
    # Once more: now the new generation has prefixes of its own.
    serving.submit(4, first=200, tokens_max=1)
    serving.finish_all()
    assert serving.loop.schedule.counters.prefix_hit_tokens == hits + 4 * 16


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"config": tiny_config() | {"rope_theta": 5000.0}},
        {"runtime": replace(RUNTIME, dtype="bfloat16")},
        {"runtime": replace(RUNTIME, kv_block_tokens=8)},
    ],
    ids=["weights", "rope", "dtype", "layout"],
)
def test_carry_is_refused(builds: Path, tmp_path: Path, change: dict[str, object]) -> None:
    options: dict[str, object] = {"seed": 1, "runtime": RUNTIME, **change}
    tiny_build(tmp_path / "c", version="2.0.0", **options)  # type: ignore[arg-type]
    first = staged(builds / "a", 1)
    other = staged(tmp_path / "c", 2, first)
    assert not other.carries(first)
    assert resolve_mode("auto", first, other) == ("recompute", True)
    with pytest.raises(SwapRefusedError, match="KV cannot be carried"):
        resolve_mode("carry", first, other)


def test_recompute_into_another_kv_layout(builds: Path, tmp_path: Path) -> None:
    tiny_build(tmp_path / "c", seed=1, version="2.0.0", runtime=replace(RUNTIME, kv_block_tokens=8))
    expected = unswapped(builds / "a")
    serving = Serving(first := staged(builds / "a", 1))
    second = staged(tmp_path / "c", 2, first)
    assert second.pool is not first.pool
    serving.submit()
    serving.until(lambda: len(serving.answers) == SEQUENCES)
    serving.swap(second)
    serving.finish_all()
    assert serving.answers == expected


def test_hard_stop_ends_what_does_not_drain(builds: Path) -> None:
    serving = Serving(first := staged(builds / "a", 1))
    serving.submit(3)
    serving.turns(5)
    serving.swap(staged(builds / "b", 2, first), "drain", hard_stop_after_s=0.0)
    assert set(serving.finish.values()) == {"cancelled"}
    serving.submit(1, first=50)
    serving.finish_all()
    assert serving.finish[50] == "length"
    assert set(serving.by[50]) == {2}


class GoesBack:
    """An observer that always has a way back to ``before``."""

    def __init__(self, before: Generation, after: Generation) -> None:
        self.before, self.carries = before, before.carries(after)
        self.reasons: list[str] = []

    def stepped(self, facts: StepFacts) -> None:
        assert facts.step_ms > 0

    def fallback(self, generation: int, why: str) -> WayBack | None:
        assert generation != self.before.number
        self.reasons.append(why)
        return WayBack(self.before, carries=self.carries)


class BrokenExec:
    """A graph whose launch fails, or whose result is not finite in every other row."""

    def __init__(self, graph_exec: GraphExec, logits: torch.Tensor, fault: str) -> None:
        self.graph_exec, self.logits, self.fault = graph_exec, logits, fault

    def replay(self) -> None:
        if self.fault == "raise":
            raise RuntimeError("launch failed")
        self.graph_exec.replay()
        self.logits[::2] = float("nan")

    def update(self, graph: Graph) -> UpdateResult:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to drop."""


@pytest.mark.parametrize("fault", ["nan", "raise"])
@pytest.mark.parametrize("same_weights", [True, False])
def test_a_new_generation_that_breaks_costs_no_request(builds: Path, fault: str, same_weights: bool) -> None:
    serving = Serving(first := staged(builds / "a", 1))
    second = staged(builds / ("a2" if same_weights else "b"), 2, first)
    observer = GoesBack(first, second)
    serving.loop.observe(observer)
    serving.submit()
    serving.until(lambda: len(serving.answers) == SEQUENCES)
    serving.swap(second)
    by_second = {request: len(answer) for request, answer in serving.answers.items()}
    execs, logits = second.graphs.execs, second.graphs.io.logits
    second.graphs.execs = {bucket: BrokenExec(execs[bucket], logits, fault) for bucket in execs}
    serving.turns(2)
    assert serving.loop.active is first
    assert observer.reasons
    serving.finish_all()
    assert set(serving.finish.values()) == {"length"}
    # Nothing that the broken generation computed got through.
    for request, count in by_second.items():
        assert serving.by[request][count:] == [1] * (ANSWER_TOKENS - count)
    if same_weights:
        assert serving.answers == unswapped(builds / "a")


def test_copy_mode_serves_the_new_weights_in_the_old_graphs_and_goes_back(builds: Path) -> None:
    serving = Serving(first := staged(builds / "a", 1))
    second = staged(builds / "b", 2, first, "copy")
    assert second.graphs is first.graphs
    assert resolve_mode("auto", first, second) == ("recompute", False)
    for number, (target, reference) in enumerate(((second, "b"), (first, "a"), (second, "b"))):
        serving.submit(4, first=10 * number)
        serving.turns(4)
        data = serving.swap(target).reply.result().data
        assert data["copy_ms"] > 0
        serving.finish_all()
        serving.submit(4, first=10 * number + 5)
        serving.finish_all()
        fresh = Serving(staged(builds / reference, 9))
        fresh.submit(4, first=10 * number + 5)
        fresh.finish_all()
        assert {request: serving.answers[request] for request in fresh.answers} == fresh.answers
    # Commit: the old generation goes, its graphs stay.
    serving.loop.detach(first)
    serving.turns(1)
    first.close()
    serving.submit(2, first=70)
    serving.finish_all()
    fresh = Serving(staged(builds / "b", 9))
    fresh.submit(2, first=70)
    fresh.finish_all()
    assert {request: serving.answers[request] for request in fresh.answers} == fresh.answers


def test_a_copy_that_fails_half_way_leaves_the_old_weights_serving(builds: Path) -> None:
    serving = Serving(first := staged(builds / "a", 1))
    second = staged(builds / "b", 2, first, "copy")
    expected = unswapped(builds / "a", 4)
    serving.submit(4)
    serving.turns(8)
    source = second.weights
    last = max(source)  # all others are copied before it
    kept = source[last]
    dict.__setitem__(source, last, kept[:3])  # type: ignore[index]  # a Mapping to everybody else
    mode, ahead = resolve_mode("auto", first, second)
    now_s = time.monotonic()
    pending = PendingSwap(second, mode, ahead, now_s, now_s + 600, None, lambda: None, lambda: None)
    serving.loop.request_swap(pending)
    serving.turns(1)
    assert pending.reply.result().code == "target_failed"
    serving.finish_all()
    assert serving.answers == expected
    dict.__setitem__(source, last, kept)  # type: ignore[index]
    serving.swap(second)
    assert serving.loop.active is second


def test_copy_mode_is_refused_when_more_than_weights_differ(builds: Path, tmp_path: Path) -> None:
    tiny_build(tmp_path / "c", seed=1, version="2.0.0", runtime=TINY_RUNTIME)
    first = staged(builds / "a", 1)
    with pytest.raises(LoadError, match="commit mode copy"):
        staged(tmp_path / "c", 2, first, "copy")
    with pytest.raises(LoadError, match="commit mode copy"):
        staged(builds / "b", 2, None, "copy")


def test_equal_weights_are_loaded_once(builds: Path) -> None:
    first = staged(builds / "a", 1)
    second = staged(builds / "a2", 2, first)
    third = staged(builds / "b", 3, first)
    addresses = {name: tensor.data_ptr() for name, tensor in first.weights.items()}
    assert {name: tensor.data_ptr() for name, tensor in second.weights.items()} == addresses
    assert not {tensor.data_ptr() for tensor in third.weights.values()} & set(addresses.values())


def test_preemption_loses_no_token(builds: Path, tmp_path: Path) -> None:
    expected = unswapped(builds / "a", 8)
    # 20 blocks of 16 tokens for 8 sequences that need 8 each.
    tiny_build(tmp_path / "small", seed=1, version="1.0.0", runtime=replace(RUNTIME, kv_blocks=20))
    serving = Serving(staged(tmp_path / "small", 1))
    serving.submit(8)
    serving.finish_all()
    assert serving.loop.schedule.counters.preemptions > 0
    assert serving.answers == expected


def test_reclaimed_blocks_cost_pages_and_nothing_else(builds: Path) -> None:
    serving = Serving(first := staged(builds / "a", 1))
    serving.submit(8)
    serving.finish_all()
    expected = dict(serving.answers)
    assert first.pool.blocks.idle > 0
    freed = serving.loop.reclaim(first.pool.blocks.capacity)
    serving.turns(1)
    assert freed.result() > 0
    assert first.pool.blocks.idle == 0
    again = serving.loop.reclaim(first.pool.blocks.capacity)
    serving.turns(1)
    assert again.result() == 0
    serving.answers.clear()
    serving.finish.clear()
    serving.submit(8)
    serving.finish_all()
    assert serving.answers == expected
