"""The reaper: three conditions, each of which holds a retired generation back."""

from __future__ import annotations

import pytest

from engine.reaper import Reaper


def test_a_generation_that_was_not_retired_is_never_due() -> None:
    reaper = Reaper()
    reaper.completed(reaper.launched(1))
    assert reaper.due() == []


def test_launches_hold_it_back_in_whatever_order_they_end() -> None:
    reaper = Reaper()
    first, second, other = reaper.launched(1), reaper.launched(1), reaper.launched(2)
    assert first < second < other
    reaper.retire(1)
    reaper.completed(second)
    assert reaper.due() == []
    reaper.completed(first)
    assert reaper.due() == [1]


def test_pins_hold_it_back() -> None:
    reaper = Reaper()
    reaper.pin(1)
    reaper.pin(1)
    reaper.retire(1)
    reaper.unpin(1)
    assert reaper.due() == []
    reaper.unpin(1)
    assert reaper.due() == [1]


def test_probation_holds_it_back() -> None:
    reaper = Reaper()
    reaper.protect(1)
    reaper.retire(1)
    assert reaper.due() == []
    reaper.protect(None)
    assert reaper.due() == [1]


def test_a_freed_number_starts_over() -> None:
    reaper = Reaper()
    reaper.retire(1)
    reaper.retire(2)
    assert reaper.due() == [1, 2]
    reaper.freed(1)
    assert reaper.due() == [2]
    epoch = reaper.launched(1)
    assert reaper.due() == [2]
    reaper.completed(epoch)


def test_use_after_retirement_and_freeing_in_use_are_defects() -> None:
    reaper = Reaper()
    epoch = reaper.launched(1)
    reaper.retire(1)
    with pytest.raises(AssertionError, match="launched after"):
        reaper.launched(1)
    with pytest.raises(AssertionError, match="pinned after"):
        reaper.pin(1)
    with pytest.raises(AssertionError, match="not due"):
        reaper.freed(1)
    reaper.completed(epoch)
    reaper.freed(1)
