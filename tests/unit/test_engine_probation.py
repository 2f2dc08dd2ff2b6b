"""Probation: each rule breaches on its own evidence, and on nothing less."""

from __future__ import annotations

from engine.probation import LOOK_STEPS, WINDOW_REQUESTS, Breach, Probation, ProbationLimits, Step

LIMITS = ProbationLimits()
DECODE, PREFILL = (4, False), (4, True)


def before(steps: int = 200, step_ms: float = 20.0, *, completed: int = 100, errors: int = 0) -> Probation:
    """On probation, after a window of steps of one shape and some requests."""
    probation = Probation(LIMITS)
    for _ in range(steps):
        probation.observe(Step(DECODE, step_ms))
    for _ in range(completed):
        probation.observe(Step("ends", 0.0, completed=1))
    for _ in range(errors):
        probation.observe(Step("ends", 0.0, errors=1))
    probation.begin()
    return probation


def steps(probation: Probation, count: int, step_ms: float, shape: object = DECODE) -> Breach | None:
    for _ in range(count):
        probation.observe(Step(shape, step_ms))
    return probation.breach()


def rule(breach: Breach | None) -> str:
    return "" if breach is None else breach.rule


def test_sound_steps_are_no_breach() -> None:
    probation = before()
    assert steps(probation, 2000, 21.0) is None
    assert probation.running


def test_one_row_that_is_not_finite_is_enough() -> None:
    probation = before()
    probation.observe(Step(DECODE, 20.0, nonfinite_rows=1))
    breach = probation.breach()
    assert breach == Breach("nonfinite_output", "1 rows of logits were not finite, 0 may be")


def test_one_failed_step_is_enough() -> None:
    probation = before()
    probation.observe(Step(DECODE, 20.0, failed=True))
    assert rule(probation.breach()) == "failed_step"


def test_what_happened_before_is_not_held_against_the_new_one() -> None:
    probation = Probation(LIMITS)
    probation.observe(Step(DECODE, 20.0, nonfinite_rows=3, failed=True))
    assert probation.breach() is None
    probation.begin()
    assert steps(probation, 100, 20.0) is None


def test_error_rate_needs_enough_requests_and_a_rise() -> None:
    probation = before()
    for _ in range(LIMITS.requests_min - 3):
        probation.observe(Step("ends", 0.0, completed=1))
    probation.observe(Step("ends", 0.0, errors=2))
    assert probation.breach() is None, "one request short of the minimum"
    probation.observe(Step("ends", 0.0, errors=1))
    breach = probation.breach()
    assert rule(breach) == "error_rate"
    assert breach is not None
    assert breach.what == "15.0% of 20 requests failed, 0.0% before; 10% more may"


def test_clients_that_failed_before_as_well_are_not_the_builds_fault() -> None:
    probation = before(completed=80, errors=20)
    for _ in range(40):
        probation.observe(Step("ends", 0.0, completed=3))
        probation.observe(Step("ends", 0.0, errors=1))
    assert probation.breach() is None


def test_slow_steps_of_the_same_shape_breach() -> None:
    probation = before(step_ms=20.0)
    assert steps(probation, LIMITS.steps_min - 1, 61.0) is None, "too few to tell"
    breach = steps(probation, LOOK_STEPS, 61.0)
    assert rule(breach) == "step_latency"
    assert breach is not None
    assert "61.0 ms, 20.0 ms before" in breach.what


def test_a_changed_mix_of_shapes_is_not_slowness() -> None:
    probation = Probation(LIMITS)
    steps(probation, 200, 20.0, DECODE)
    steps(probation, 200, 90.0, PREFILL)
    probation.begin()
    assert steps(probation, 300, 90.0, PREFILL) is None
    assert steps(probation, 300, 90.0, "a shape never seen before") is None


def test_twice_as_slow_and_slow_but_tiny_are_let_be() -> None:
    assert steps(before(step_ms=20.0), 300, 59.0) is None
    assert steps(before(step_ms=0.5), 300, 5.0) is None, "ten times, but nobody notices 5 ms"


def test_few_slow_steps_do_not_move_the_median() -> None:
    probation = before(step_ms=20.0)
    for _ in range(100):
        steps(probation, 2, 20.0)
        steps(probation, 1, 900.0)
    assert probation.breach() is None


def test_the_first_breach_stays() -> None:
    probation = before()
    probation.observe(Step(DECODE, 20.0, nonfinite_rows=1))
    probation.observe(Step(DECODE, 20.0, failed=True))
    assert rule(probation.breach()) == "nonfinite_output"
    probation.end(committed=False)
    assert rule(probation.breach()) == "nonfinite_output", "still told after the exchange back"
    probation.begin()
    assert probation.breach() is None


def test_a_committed_generation_is_the_next_ones_measure() -> None:
    probation = before(step_ms=20.0)
    steps(probation, 200, 50.0)
    probation.end(committed=True)
    probation.begin()
    assert steps(probation, 200, 100.0) is None
    probation.end(committed=False)
    probation.begin()
    # Rolled back: its 100 ms are not the measure.
    assert rule(steps(probation, 200, 160.0)) == "step_latency"


def test_the_window_before_is_the_recent_past() -> None:
    probation = Probation(LIMITS)
    for _ in range(WINDOW_REQUESTS):
        probation.observe(Step("ends", 0.0, errors=1))
    for _ in range(WINDOW_REQUESTS):
        probation.observe(Step("ends", 0.0, completed=1))
    probation.begin()
    probation.observe(Step("ends", 0.0, completed=15, errors=5))
    assert rule(probation.breach()) == "error_rate"
