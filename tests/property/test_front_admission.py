"""Admission: never more than the limits waits, nothing is refused without need, and Retry-After is a sane integer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.front.admission import AdmissionQueue, QueueLimits


class Queue(RuleBasedStateMachine):
    """Offers, beginnings, ends and time in any order, against a plain list."""

    @initialize(sequences=st.integers(1, 10), tokens=st.integers(1, 100))
    def start(self, sequences: int, tokens: int) -> None:
        self.now_s = 1000.0
        self.limits = QueueLimits(sequences, tokens)
        self.queue = AdmissionQueue(self.now_s, self.limits)
        self.waiting: list[int] = []

    @rule(sequences=st.integers(1, 4), tokens=st.integers(1, 120))
    def offer(self, sequences: int, tokens: int) -> None:
        room = len(self.waiting) + sequences <= self.limits.sequences
        small = sum(self.waiting) + sequences * tokens <= self.limits.prompt_tokens
        assert self.queue.fits(sequences, tokens) == (room and (small or not self.waiting))
        if self.queue.fits(sequences, tokens):
            for _ in range(sequences):
                self.queue.enter(tokens)
                self.waiting.append(tokens)

    @precondition(lambda self: self.waiting)
    @rule(ends=st.booleans(), which=st.integers(0, 100))
    def leave(self, ends: bool, which: int) -> None:
        self.queue.leave(self.waiting.pop(which % len(self.waiting)))
        if ends:
            self.queue.ended(self.now_s)

    @rule()
    def end(self) -> None:
        self.queue.ended(self.now_s)

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds(self) -> None:
        assert (self.queue.sequences, self.queue.prompt_tokens) == (len(self.waiting), sum(self.waiting))
        assert self.queue.sequences <= self.limits.sequences
        retry_s = self.queue.retry_after_s(self.now_s)
        assert type(retry_s) is int
        assert 1 <= retry_s <= 60


TestQueue = Queue.TestCase


@given(st.integers(1, 10**9))
def test_a_request_that_would_wait_alone_fits_whatever_its_prompt(tokens: int) -> None:
    assert AdmissionQueue(0.0).fits(8, tokens)


@given(rate=st.floats(0.2, 50), waiting=st.integers(1, 64), seconds=st.floats(10, 300))
def test_retry_after_follows_the_rate_of_ends(rate: float, waiting: int, seconds: float) -> None:
    queue = AdmissionQueue(0.0)
    for _ in range(waiting):
        queue.enter(1)
    for index in range(1, int(rate * seconds) + 1):
        queue.ended(index / rate)
    now_s = max(seconds, 1 / rate)
    assert queue.rate_per_s(now_s) == pytest.approx(rate, rel=0.6)
    expected = waiting / 2 / queue.rate_per_s(now_s)
    assert queue.retry_after_s(now_s) == min(max(math.ceil(expected), 1), 60)


def test_an_engine_that_ends_nothing_gives_the_longest_wait_and_more_ends_a_shorter_one() -> None:
    queue = AdmissionQueue(0.0)
    for _ in range(64):
        queue.enter(10)
    waits = []
    for index in range(200):
        waits.append(queue.retry_after_s(30.0 + index / 100))
        queue.ended(30.0 + index / 100)
    assert waits[0] == 60
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < 10
