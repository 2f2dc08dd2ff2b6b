"""Once the journal names the new build, freeing the old one must not be able to undo that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patchctl.agent.ending import release_after_commit
from patchctl.errors import PatchctlError


def context(failure: Exception | None) -> Any:
    def release(_generation: int) -> None:
        if failure is not None:
            raise failure

    return SimpleNamespace(host=SimpleNamespace(release=release))


@pytest.mark.parametrize(
    ("failure", "remark"),
    [
        (None, ""),
        (PatchctlError("engine.not_ready", "it is gone", "the process was replaced"), ""),
        (PatchctlError("engine.internal", "it failed", "out of memory"), "generation 4 is still resident"),
        (KeyError("paths"), "generation 4 is still resident"),
    ],
)
def test_a_commit_survives_whatever_release_does(failure: Exception | None, remark: str) -> None:
    said = release_after_commit(context(failure), 4)
    assert remark in said
    assert bool(said) == bool(remark)
