"""When observers get large answers: fewer than one of a hundred steps waits for a copy."""

from __future__ import annotations

import pytest

from cs_proto.messages import Get
from cs_server.large_answers import LargeAnswers

COPY = 0.05  # seconds that an answer takes


def question(number: int) -> Get:
    return Get(number, (), ("w",), True)


def delayed(step: float, seconds: float) -> float:
    """The share of the steps that wait for a copy beside an observer that asks without end. Steps take ``step`` seconds
    without it."""
    large, now, commits, answers = LargeAnswers(), 0.0, 0, 0
    while now < seconds:
        if large.may_be_made(commits, now):
            large.made_for_observer(commits, now, now + COPY)
            now += COPY
            answers += 1
        now += step
        commits += 1
    return answers / commits


@pytest.mark.parametrize("step", [0.0006, 0.002, 0.01, 0.018])
def test_fewer_than_one_of_a_hundred_steps_waits_however_fast_observers_ask(step: float) -> None:
    assert 0.004 < delayed(step, 60.0) < 0.01


def test_no_observer_waits_longer_than_two_seconds() -> None:
    large = LargeAnswers()
    large.made_for_observer(7, 0.0, COPY)
    assert not large.may_be_made(57, COPY + 1.9)
    assert large.may_be_made(57, COPY + 2.1)


@pytest.mark.parametrize("step", [0.06, 1.0])
def test_nobody_waits_where_steps_take_longer_than_the_copy(step: float) -> None:
    assert delayed(step, 60.0) > 0.9


def test_nobody_waits_where_nothing_is_committed() -> None:
    large = LargeAnswers()
    for number in range(10):
        assert large.may_be_made(40, COPY * number)
        large.made_for_observer(40, COPY * number, COPY * (number + 1))
    assert not large.may_be_made(41, 10 * COPY + 0.4)  # all of them have delayed the same step
    assert large.may_be_made(41, 10 * COPY + 0.5)


def test_a_question_is_repeated_while_its_answer_may_be_under_way() -> None:
    large = LargeAnswers()
    assert not large.is_repeated(b"o1", question(1), 0.0)
    large.made(b"o1", question(1), 10.0)
    large.made(b"o2", question(5), 11.0)
    assert large.is_repeated(b"o1", question(1), 11.9)
    assert not large.is_repeated(b"o1", question(2), 11.9)
    assert not large.is_repeated(b"o2", question(1), 11.9)
    assert not large.is_repeated(b"o1", question(1), 12.0)
