"""The decision at a step boundary, case by case."""

from __future__ import annotations

import pytest

from engine.errors import SwapRefusedError
from engine.exchange import AHEAD_STEPS_MAX, Action, Boundary, Mode, Policy, decide, hold_admission, resolve


@pytest.mark.parametrize(
    ("policy", "shared", "mode"),
    [
        ("auto", True, "carry"),
        ("auto", False, "recompute"),
        ("carry", True, "carry"),
        ("recompute", True, "recompute"),
        ("recompute", False, "recompute"),
        ("drain", True, "drain"),
        ("drain", False, "drain"),
    ],
)
def test_policy_resolves(policy: Policy, shared: bool, mode: Mode) -> None:
    assert resolve(policy, carries=shared, same_vocabulary=True) == mode


@pytest.mark.parametrize(
    ("policy", "same_vocabulary", "code"),
    [("carry", True, "carry_refused"), ("auto", False, "recompute_refused"), ("recompute", False, "recompute_refused")],
)
def test_policy_that_would_mix_models_is_refused(policy: Policy, same_vocabulary: bool, code: str) -> None:
    with pytest.raises(SwapRefusedError) as refused:
        resolve(policy, carries=False, same_vocabulary=same_vocabulary)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("mode", "running", "behind", "fits", "late", "hard_stop", "action"),
    [
        ("carry", 4, 0, True, False, False, Action.EXCHANGE),
        ("carry", 0, 0, True, False, False, Action.EXCHANGE),
        # A carried generation has cached nothing of its own.
        ("carry", 4, 9, True, False, False, Action.EXCHANGE),
        ("recompute", 4, 2, True, False, False, Action.WAIT),
        ("recompute", 4, 2, False, False, False, Action.WAIT),
        ("recompute", 4, 0, True, False, False, Action.EXCHANGE),
        ("recompute", 4, 0, False, False, False, Action.WAIT),
        ("drain", 1, 0, True, False, False, Action.WAIT),
        ("drain", 0, 0, False, False, False, Action.EXCHANGE),
        ("drain", 1, 0, True, False, True, Action.HARD_STOP),
        ("drain", 1, 0, True, True, True, Action.HARD_STOP),
        ("drain", 0, 0, True, False, True, Action.EXCHANGE),
        ("carry", 4, 0, True, False, True, Action.EXCHANGE),
        ("carry", 4, 0, True, True, False, Action.MISS),
        ("recompute", 4, 9, True, True, False, Action.MISS),
        ("drain", 0, 0, True, True, False, Action.MISS),
    ],
)
def test_decide(mode: Mode, running: int, behind: int, fits: bool, late: bool, hard_stop: bool, action: Action) -> None:
    boundary = Boundary(running=running, behind=behind, fits=fits, late=late, hard_stop=hard_stop)
    assert decide(mode, boundary) is action


def test_admission_is_held_only_while_it_must_be() -> None:
    assert hold_admission("drain", 0)
    assert not hold_admission("carry", 0)
    assert not hold_admission("recompute", AHEAD_STEPS_MAX - 1)
    assert hold_admission("recompute", AHEAD_STEPS_MAX)
