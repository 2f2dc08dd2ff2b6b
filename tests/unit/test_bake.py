"""When a probation ends at once, and how long its window must be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patchctl.agent.bake import Counters, _window_s, bake, breach
from patchctl.agent.settings import BakeLimits
from patchctl.bundle.config import Declared
from patchctl.errors import PatchctlError


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (Counters(20, 0, 0), ""),
        (Counters(20, 2, 0), "2 requests failed"),
        (Counters(20, 0, 1), "1 rows of non-finite logits"),
    ],
)
def test_breach(now: Counters, why: str) -> None:
    assert breach(Counters(10, 0, 0), now) == why


def test_failures_from_before_the_swap_do_not_count() -> None:
    assert breach(Counters(10, 5, 3), Counters(20, 5, 3)) == ""


def test_growth_must_outlast_a_heap_that_is_filling_up() -> None:
    limits = BakeLimits(bake_s=10, bake_s_max=60)
    assert _window_s(limits, "none") == 10
    assert _window_s(limits, "shown") == 20
    assert _window_s(limits, "unclear") == 60
    assert _window_s(BakeLimits(bake_s=10, bake_s_max=15), "shown") == 15


_DECLARED = Declared(files=(), tensors=(), growth_bytes_per_request_max=None, summary="")


class Scene:
    """A host on probation, seen once per look. Responses on the old path end, as failures, at the third."""

    def __init__(self, *, breach_at: int = 0, lost_at: int = 0) -> None:
        self.looks = 0
        self.breach_at = breach_at
        self.lost_at = lost_at
        limits = BakeLimits(settle_s_min=0, bake_s=0, bake_s_max=60, requests_min=1)
        self.host = self
        self.settings = SimpleNamespace(bake=limits)
        self.growth_so_far = lambda _declared: "none"
        self.begin_after_window = lambda: None

    def sleep(self, _seconds: float) -> None:
        self.looks += 1

    def check(self) -> None:
        if self.lost_at and self.looks >= self.lost_at:
            raise PatchctlError("host.process_lost", "lost", "killed")

    def front_stats(self) -> dict[str, Any]:
        cut = self.looks >= 3
        return {
            "requests_completed": self.looks,
            "requests_failed": 2 if cut else 0,
            "paths": [{"generation": 1, "responses_open": 0 if cut else 2}, {"generation": 2, "responses_open": 1}],
        }

    def engine_stats(self) -> dict[str, Any]:
        back = self.breach_at and self.looks >= self.breach_at
        return {
            "active_generation": 1 if back else 2,
            "nonfinite_rows": 0,
            "generations": [{"generation": 2, "breach": "logits are not finite" if back else ""}],
        }

    def bake(self, *, drained: bool = False) -> dict[str, Any]:
        here: Any = self
        return bake(here, here, _DECLARED, generation=2, drained=drained, wholeness=here)


def test_responses_that_a_drain_cut_off_are_not_the_new_generations_fault() -> None:
    assert Scene().bake(drained=True)["requests"] >= 1
    with pytest.raises(PatchctlError) as failed:
        Scene().bake()
    assert failed.value.why == "2 requests failed"


@pytest.mark.parametrize(
    ("scene", "code", "why"),
    [
        (Scene(breach_at=2), "bake.breach", "logits are not finite"),
        (Scene(lost_at=2), "host.process_lost", "killed"),
    ],
)
def test_what_ends_a_probation_is_noticed_at_the_next_look(scene: Scene, code: str, why: str) -> None:
    with pytest.raises(PatchctlError) as failed:
        scene.bake()
    assert (failed.value.code, failed.value.why, scene.looks) == (code, why, 2)
