"""The bound of a rate, against the binomial sum written down another way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.soak.bound import upper_bound


@given(trials=st.integers(1, 400), data=st.data())
def test_at_the_bound_so_few_violations_have_a_probability_of_five_percent(trials: int, data: st.DataObject) -> None:
    violations = data.draw(st.integers(0, trials - 1))
    p = upper_bound(violations, trials)
    assert violations / trials < p < 1
    chance = sum(math.comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(violations + 1))
    assert chance == pytest.approx(0.05, rel=1e-6)


@pytest.mark.parametrize("trials", [100, 1000, 1_000_000])
def test_without_violations_it_is_the_rule_of_three(trials: int) -> None:
    assert upper_bound(0, trials) == pytest.approx(1 - 0.05 ** (1 / trials), rel=1e-6)
    assert upper_bound(0, trials) == pytest.approx(3 / trials, rel=0.02)


def test_nothing_tried_and_nothing_kept_say_nothing() -> None:
    assert upper_bound(0, 0) == upper_bound(5, 5) == 1.0
    with pytest.raises(ValueError, match="3 violations in 2 trials"):
        upper_bound(3, 2)
