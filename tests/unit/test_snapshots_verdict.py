"""The verdict: what commits, what rolls back, what holds, and what it tells the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshots.diff import HostDiff, diff
from snapshots.growth import Growth, GrowthEstimate, Insufficient, Step
from snapshots.model import (
    Gap,
    GenerationState,
    HostSnapshot,
    PageSet,
    ProcessSnapshot,
    Region,
    TensorState,
)
from snapshots.noise import IdleNoise
from snapshots.verdict import (
    OUTCOME_OF,
    DeclaredEffects,
    Effect,
    Finding,
    GrowthEvidence,
    Verdict,
    VerdictLimits,
    judge,
)

_W = TensorState("aa" * 16, "float32", (4, 4))
_V = TensorState("bb" * 16, "float32", (4, 4))
_OLD = GenerationState(1, "sha256:old", {"model.embed": _W, "model.layers.3.up": _W, "model.layers.3.down": _W})
_NEW = GenerationState(2, "sha256:new", _OLD.tensors)
_HEAP = Region(0x1000, 0x9000, "rw-p", "heap", "[heap]", 0x8000, 0x8000, "page_hash", "exact")


def flat(bytes_per_request: float = 0, *, spread: float = 1000, steps: tuple[Step, ...] = ()) -> GrowthEstimate:
    low, high = bytes_per_request - spread, bytes_per_request + spread
    return GrowthEstimate(bytes_per_request, low, high, "requests", 15, 14, 560, steps)


def grown(before: Growth, after: Growth) -> dict[str, GrowthEvidence]:
    return {"front": GrowthEvidence(before, after), "engine": GrowthEvidence(flat(), flat())}


_QUIET = grown(flat(), flat())


def process(role: str, *regions: Region, gaps: tuple[Gap, ...] = (), pid: int = 5) -> ProcessSnapshot:
    return ProcessSnapshot(role, pid, 1, 0x8000, 0x8000, 0x8000, (_HEAP, *regions), gaps)


def host(
    serving: int, *generations: GenerationState, processes: Mapping[str, ProcessSnapshot] | None = None
) -> HostSnapshot:
    default = {role: process(role) for role in ("front", "engine")}
    return HostSnapshot(0, serving, generations, processes if processes is not None else default)


_BEFORE = host(1, _OLD, _NEW)
_AFTER = host(2, _OLD, _NEW)


def with_tensor(state: GenerationState, name: str, tensor: TensorState | None) -> GenerationState:
    tensors = {key: value for key, value in state.tensors.items() if key != name}
    return replace(state, tensors=tensors if tensor is None else {**tensors, name: tensor})


def with_front(front: ProcessSnapshot) -> HostSnapshot:
    return replace(_AFTER, processes={"front": front, "engine": process("engine")})


def judged(
    before: HostSnapshot = _BEFORE,
    after: HostSnapshot = _AFTER,
    growth: Mapping[str, GrowthEvidence] = _QUIET,
    declared: DeclaredEffects | None = None,
    limits: VerdictLimits | None = None,
) -> Verdict:
    return judge(diff(before, after), declared or DeclaredEffects(), growth, limits or VerdictLimits())


def only(verdict: Verdict, effect: Effect) -> Finding:
    (finding,) = [f for f in verdict.findings if f.effect == effect]
    return finding


def test_nothing_changed_commits() -> None:
    verdict = judged()
    assert verdict.outcome == "commit"
    assert {f.effect for f in verdict.findings} == {"unchanged"}


# --- tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [None, _V, replace(_W, dtype="bfloat16"), replace(_W, shape=(16,))])
def test_undeclared_tensor_change_between_builds_rolls_back(tensor: TensorState | None) -> None:
    changed = with_tensor(_NEW, "model.embed", tensor)
    verdict = judged(host(1, _OLD, changed), host(2, _OLD, changed))
    assert verdict.outcome == "rollback"
    finding = only(verdict, "corruption")
    assert finding.subject == "tensor model.embed"
    assert "undeclared change" in finding.what
    assert finding.before != finding.after


def test_a_buffer_computed_from_the_configuration_may_differ_between_builds_and_never_while_resident() -> None:
    old, new = (replace(one, derived=True) for one in (_W, _V))
    first, second = with_tensor(_OLD, "buffers.cos", old), with_tensor(_NEW, "buffers.cos", new)
    assert judged(host(1, first, second), host(2, first, second)).outcome == "commit"
    spoiled = with_tensor(second, "buffers.cos", replace(old, digest="cc" * 16))
    assert judged(host(1, first, second), host(2, first, spoiled)).outcome == "rollback"
    stored = with_tensor(_NEW, "buffers.cos", _V)
    assert judged(host(1, first, stored), host(2, first, stored)).outcome == "rollback"


def test_undeclared_new_tensor_rolls_back() -> None:
    changed = with_tensor(_NEW, "model.extra", _V)
    verdict = judged(host(1, _OLD, changed), host(2, _OLD, changed))
    assert only(verdict, "corruption").before == "absent"


@pytest.mark.parametrize("glob", ["model.layers.3.up", "model.layers.3.*", "*.up"])
def test_declared_tensor_change_is_expected(glob: str) -> None:
    changed = with_tensor(_NEW, "model.layers.3.up", _V)
    verdict = judged(host(1, _OLD, changed), host(2, _OLD, changed), declared=DeclaredEffects((glob,)))
    assert verdict.outcome == "commit"
    assert only(verdict, "expected").subject == "tensor model.layers.3.up"


def test_a_name_with_brackets_is_declared_by_itself() -> None:
    changed = with_tensor(_NEW, "blocks[0]", _V)
    verdict = judged(host(1, _OLD, changed), host(2, _OLD, changed), declared=DeclaredEffects(("blocks[0]",)))
    assert verdict.outcome == "commit"


def test_declared_but_untouched_is_a_note() -> None:
    verdict = judged(declared=DeclaredEffects(("model.norm",)))
    assert verdict.outcome == "commit"
    assert any("nothing it names differs" in f.what for f in verdict.findings)


@pytest.mark.parametrize(
    ("generation", "word"), [(_OLD, "rollback would not be exact"), (_NEW, "no longer is what was staged")]
)
def test_change_while_resident_rolls_back_even_if_declared(generation: GenerationState, word: str) -> None:
    changed = with_tensor(generation, "model.layers.3.up", _V)
    after = host(2, *(changed if state is generation else state for state in (_OLD, _NEW)))
    verdict = judged(_BEFORE, after, declared=DeclaredEffects(("*",)))
    assert verdict.outcome == "rollback"
    finding = only(verdict, "corruption")
    assert word in finding.what
    assert f"generation {generation.generation}" in finding.subject


@pytest.mark.parametrize(("before", "after"), [(host(1, _OLD), _AFTER), (_BEFORE, host(2, _NEW))])
def test_generation_without_a_counterpart_holds(before: HostSnapshot, after: HostSnapshot) -> None:
    assert judged(before, after).outcome == "hold"


def test_generation_number_reused_for_another_build_holds() -> None:
    verdict = judged(_BEFORE, host(2, replace(_OLD, build_digest="sha256:other"), _NEW))
    assert verdict.outcome == "hold"


def test_no_tensors_at_all_holds() -> None:
    empty = (replace(_OLD, tensors={}), replace(_NEW, tensors={}))
    assert judged(host(1, *empty), host(2, *empty)).outcome == "hold"


# --- processes -------------------------------------------------------------------------------------------------


def test_missing_and_replaced_processes_hold() -> None:
    for processes in ({"engine": process("engine")}, {"front": process("front", pid=6), "engine": process("engine")}):
        verdict = judged(after=replace(_AFTER, processes=processes))
        assert verdict.outcome == "hold"
        assert only(verdict, "unknown").subject == "process front"


_DEVICE = Region(0xA000, 0xB000, "rw-s", "device", "/dev/nvidia0", 0, 0, "none", "blind", reason="device memory")


def test_blind_memory_holds_unless_the_host_accepts_it_by_name() -> None:
    after = with_front(process("front", _DEVICE))
    verdict = judged(after=after)
    assert verdict.outcome == "hold"
    assert "/dev/nvidia0" in only(verdict, "unknown").subject
    verdict = judged(after=after, limits=VerdictLimits(blind_accepted=("/dev/nvidia*",)))
    assert verdict.outcome == "commit"
    assert any("accepted by this host" in f.what for f in verdict.findings)


def test_blind_memory_present_all_along_holds_and_gone_does_not() -> None:
    before = replace(_BEFORE, processes=with_front(process("front", _DEVICE)).processes)
    assert judged(before, with_front(process("front", _DEVICE))).outcome == "hold"
    assert judged(before, _AFTER).outcome == "commit"


@pytest.mark.parametrize(("blind", "outcome"), [(True, "hold"), (False, "commit")])
def test_gaps(blind: bool, outcome: str) -> None:
    after = with_front(process("front", gaps=(Gap("io_uring:12", "not seen", blind),)))
    assert judged(after=after).outcome == outcome


def _code(perms: str, *digests: int) -> Region:
    numbers = range(0xC, 0xC + len(digests))
    pages = PageSet(np.array(numbers, "<u8").tobytes(), np.array(digests, "<u8").tobytes())
    return Region(0xC000, 0xE000, perms, "file", "/lib/a.so", 0x2000, 0, "page_hash", "exact", pages)


def test_overwritten_code_rolls_back_but_data_does_not() -> None:
    for perms, outcome in (("r-xp", "rollback"), ("rw-p", "commit")):
        before = replace(_BEFORE, processes=with_front(process("front", _code(perms))).processes)
        assert judged(before, with_front(process("front", _code(perms, 9)))).outcome == outcome


def test_one_time_allocation_is_not_growth() -> None:
    staged = Region(0x10000, 0x40010000, "rw-p", "anon", "", 1 << 30, 1 << 30, "page_hash", "exact")
    front = replace(process("front", staged), anonymous_bytes=(1 << 30) + 0x8000)
    verdict = judged(after=with_front(front))
    assert verdict.outcome == "commit"
    finding = only(verdict, "expected")
    assert (finding.before, finding.after) == ("32.0 KiB anonymous", "1024.0 MiB anonymous")


# --- growth ----------------------------------------------------------------------------------------------------

_LEAK = flat(16 << 10)
_WIDE = flat(0, spread=100_000)
_NONE = Insufficient("3 samples")


@pytest.mark.parametrize(
    ("before", "after", "declared", "effect", "what"),
    [
        (flat(), flat(), None, "unchanged", "no growth"),
        (flat(), _LEAK, None, "growth", "grows by more than"),
        (_NONE, _LEAK, None, "growth", "grows by more than"),
        (_WIDE, _LEAK, None, "growth", "grows by more than"),  # a noisy baseline allows nothing
        (_LEAK, _LEAK, None, "unchanged", "as it did before"),
        (_LEAK, flat(64 << 10), None, "growth", "grows by more than"),
        (_LEAK, flat(), None, "expected", "growth removed"),
        (_LEAK, flat(), 0, "expected", "growth removed"),
        (_LEAK, _LEAK, 0, "growth", "declared 0 B"),
        (flat(), _LEAK, 16 << 10, "expected", "declared maximum"),
        (flat(), flat(64 << 10), 16 << 10, "growth", "declared 16.0 KiB"),
        (flat(), _WIDE, None, "unknown", "too wide"),
        (flat(), flat(8 << 10, spread=4096), None, "unknown", "can't be ruled out"),
        (flat(), _NONE, None, "unknown", "3 samples"),
        (flat(), flat(-(64 << 10)), None, "unchanged", "no growth"),
    ],
)
def test_growth(before: Growth, after: Growth, declared: int | None, effect: Effect, what: str) -> None:
    effects = DeclaredEffects((), {} if declared is None else {"front": declared})
    verdict = judged(growth=grown(before, after), declared=effects)
    finding = next(f for f in verdict.findings if f.subject == "memory per request of front")
    assert (finding.effect, verdict.outcome) == (effect, OUTCOME_OF[effect])
    assert what in finding.what


def test_removed_growth_states_both_figures() -> None:
    verdict = judged(growth=grown(_LEAK, flat()))
    finding = next(f for f in verdict.findings if f.what == "growth removed")
    assert finding.before.startswith("16.0 KiB/request")
    assert finding.after.startswith("0 B/request")


def test_steps_are_stated() -> None:
    verdict = judged(growth=grown(flat(), flat(steps=(Step(7, 12 << 20),))))
    assert verdict.outcome == "commit"
    assert "rose once by 12.0 MiB" in only(verdict, "expected").what


@pytest.mark.parametrize(
    ("idle_bytes", "after", "effect"),
    [
        (0, flat(), "unchanged"),
        (10**9, flat(), "unchanged"),
        (0, _LEAK, "growth"),
        (flat().requests * (16 << 10) - 8192 * flat().requests, _LEAK, "growth"),
        (flat().requests * (16 << 10), _LEAK, "unknown"),
        (flat().requests * (16 << 10), flat(64 << 10), "growth"),
    ],
)
def test_noise_of_the_idle_process_turns_growth_into_unknown_and_never_excuses_it(
    idle_bytes: int, after: GrowthEstimate, effect: Effect
) -> None:
    evidence = GrowthEvidence(flat(), after, IdleNoise(idle_bytes, 3))
    verdict = judged(growth={**_QUIET, "front": evidence})
    finding = next(f for f in verdict.findings if f.subject == "memory per request of front")
    assert (finding.effect, verdict.outcome) == (effect, OUTCOME_OF[effect])


def test_a_role_that_was_not_sampled_holds() -> None:
    verdict = judged(growth={"engine": GrowthEvidence(flat(), flat())})
    assert verdict.outcome == "hold"
    assert verdict.reasons == (only(verdict, "unknown"),)


# --- the whole -------------------------------------------------------------------------------------------------


@st.composite
def diffs(draw: st.DrawFn) -> HostDiff:
    def states() -> tuple[GenerationState, ...]:
        tensor = st.sampled_from([_W, _V])
        return tuple(
            GenerationState(n, f"sha256:{n}", draw(st.dictionaries(st.sampled_from("pqr"), tensor)))
            for n in sorted(draw(st.sets(st.sampled_from([1, 2]))) | {serving})
        )

    def processes() -> dict[str, ProcessSnapshot]:
        roles = draw(st.sets(st.sampled_from(["front", "engine"])))
        gaps = draw(st.sampled_from([(), (Gap("g", "r", True),)]))
        regions = draw(st.sampled_from([(), (_DEVICE,), (_code("r-xp"),), (_code("r-xp", 4),)]))
        return {role: process(role, *regions, gaps=gaps, pid=draw(st.integers(5, 6))) for role in roles}

    serving = draw(st.sampled_from([1, 2]))
    before = HostSnapshot(0, serving, states(), processes())
    serving = draw(st.sampled_from([1, 2]))
    return diff(before, HostSnapshot(1, serving, states(), processes()))


_growths = st.sampled_from([flat(), _LEAK, _WIDE, _NONE, flat(1 << 20)])
_evidence = st.dictionaries(st.sampled_from(["front", "engine"]), st.builds(GrowthEvidence, _growths, _growths))
_declared = st.builds(
    DeclaredEffects,
    st.lists(st.sampled_from(["p", "q", "*"]), max_size=2).map(tuple),
    st.dictionaries(st.sampled_from(["front", "engine"]), st.sampled_from([0, 1 << 14])),
)


@given(diffs(), _declared, _evidence)
def test_commit_needs_complete_and_clean_evidence(
    found: HostDiff, declared: DeclaredEffects, growth: dict[str, GrowthEvidence]
) -> None:
    """Stated from the evidence, not from the findings, so that a finding left out is noticed."""
    verdict = judge(found, declared, growth)
    if verdict.outcome != "commit":
        assert verdict.reasons
        return
    assert {p.role for p in found.processes} >= {"front", "engine"}
    assert not any(p.replaced or any(gap.blind for gap in p.gaps) for p in found.processes)
    assert not any(c.confidence == "blind" and c.event != "gone" for p in found.processes for c in p.regions)
    assert not any(resident.changes for resident in found.resident)
    assert {found.exchange.generation_before, found.exchange.generation_after} <= {
        resident.generation_before for resident in found.resident
    }
    assert all(change.name in declared.tensors or "*" in declared.tensors for change in found.exchange.changes)
    for role in ("front", "engine"):
        after = growth[role].after
        assert isinstance(after, GrowthEstimate)
        before = growth[role].before
        baseline = before.high if isinstance(before, GrowthEstimate) and before.low > 8 << 10 else 0
        assert after.high <= declared.growth_bytes_per_request_max.get(role, baseline) + (8 << 10)


def test_verdict_and_diff_are_json_ready() -> None:
    changed = with_tensor(_NEW, "model.embed", _V)
    found = diff(_BEFORE, host(2, _OLD, changed))
    verdict = judge(found, DeclaredEffects(), _QUIET)
    assert msgspec.json.decode(msgspec.json.encode(verdict.as_dict()))["outcome"] == "rollback"
    assert msgspec.json.decode(msgspec.json.encode(found.as_dict()))["exchange"]["changes"][0]["name"] == "model.embed"
