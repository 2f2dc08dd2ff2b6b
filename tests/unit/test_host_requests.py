"""What the agent API takes, and the numbers it refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from patchctl.agent.requests import DeployRequest, ReclaimRequest, SwapOptions


def test_a_deploy_without_options_is_what_it_always_was() -> None:
    asked = msgspec.json.decode(b'{"op_id": "x"}', type=DeployRequest)
    assert asked.swap == SwapOptions(policy="auto", commit_mode="auto", hard_stop_after_s=None)


@pytest.mark.parametrize(
    "swap",
    [
        {"policy": "fast"},
        {"commit_mode": "move"},
        {"hard_stop_after_s": -1},
        {"hard_stop_after_s": 3601},
        {"hard_stop_after_s": "1"},
        {"deadline_s": 1},
    ],
)
def test_unknown_and_absurd_options_are_refused(swap: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"op_id": "x", "swap": swap}), type=DeployRequest)


@pytest.mark.parametrize(
    "asked",
    [
        {"high": 0.5, "low": 0.5},
        {"high": 1.1},
        {"low": 0.0},
        {"low": -0.1},
        {"policy": "always"},
        {"now": "yes"},
    ],
)
def test_thresholds_without_hysteresis_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(asked), type=ReclaimRequest)


def test_a_reclaim_of_nothing_changes_nothing() -> None:
    assert msgspec.json.decode(b"{}", type=ReclaimRequest) == ReclaimRequest(policy=None, now=False)
