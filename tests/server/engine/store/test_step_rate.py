"""Steps a second, as they are noted each second."""

from __future__ import annotations

import pytest

from cs_server.engine.store.step_rate import StepRate


def after(seconds: int, duration: float, begun: float = 0.0) -> StepRate:
    """Steps of that duration, noted each second."""
    rate = StepRate(0.0, 0)
    for second in range(1, seconds + 1):
        rate.note(float(second), int(max(0.0, second - begun) / duration))
    return rate


@pytest.mark.parametrize("duration", [0.001, 0.3, 0.7, 1.0, 2.0, 4.0, 9.0, 30.0])
def test_long_and_short_steps_have_the_rate_that_they_have(duration: float) -> None:
    rate = after(100, duration)
    for moment in (100.2, 100.9):
        assert rate.at(moment, int(moment / duration)) == pytest.approx(1 / duration, rel=0.15)


def test_the_time_before_the_first_steps_does_not_count_for_long() -> None:
    assert after(103, 0.01, begun=100.0).at(103.0, 300) == pytest.approx(100)
    assert after(112, 2.0, begun=100.0).at(112.0, 6) == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize(("duration", "silence"), [(0.01, 2.6), (2.0, 7.0), (30.0, 100.0)])
def test_steps_that_end_no_more_have_no_rate(duration: float, silence: float) -> None:
    rate, steps = after(90, duration), int(90 / duration)
    assert rate.at(90.0 + duration, steps) > 0
    for second in range(91, int(90 + silence)):
        rate.note(float(second), steps)
    assert rate.at(90.0 + silence, steps) == 0


def test_the_first_steps_have_a_rate_at_once() -> None:
    rate = StepRate(5.0, 70)
    assert rate.at(5.5, 70) == 0
    assert rate.at(5.5, 80) == pytest.approx(20)
