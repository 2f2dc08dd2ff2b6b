"""Which generation a rollback names: never a toggle."""

from __future__ import annotations

import pytest

from patchctl.errors import ExitCode, PatchctlError
from patchctl.journal.record import GenerationRecord
from patchctl.transaction.rollback_target import choose_target


def generation(number: int, digest: str, *, committed: bool = True) -> GenerationRecord:
    return GenerationRecord(
        number=number,
        digest=f"sha256:{digest}",
        version=f"1.0.{digest}",
        transaction_id=None,
        state="committed" if committed else "rolled-back",
        committed_unix_ns=number if committed else None,
    )


A, B, C = generation(1, "a"), generation(2, "b"), generation(3, "c")


def test_default_is_the_build_committed_before() -> None:
    assert choose_target([A, B, C], C, None) == B


def test_a_second_rollback_goes_further_back_and_never_toggles() -> None:
    back_on_b = generation(4, "b")
    assert choose_target([A, B, C, back_on_b], back_on_b, None) == A
    back_on_a = generation(5, "a")
    with pytest.raises(PatchctlError) as caught:
        choose_target([A, B, C, back_on_b, back_on_a], back_on_a, None)
    assert caught.value.exit_code is ExitCode.NOT_FOUND
    assert "3 (1.0.c)" in caught.value.why


def test_a_generation_that_was_rolled_back_is_never_a_target() -> None:
    bad = generation(2, "b", committed=False)
    assert choose_target([A, bad, C], C, None) == A
    with pytest.raises(PatchctlError):
        choose_target([A, bad, C], C, 2)


def test_by_name() -> None:
    assert choose_target([A, B, C], C, 1) == A
    with pytest.raises(PatchctlError):
        choose_target([A, B, C], C, 3)
