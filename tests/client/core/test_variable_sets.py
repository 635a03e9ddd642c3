"""Sets of variables that are known by identity."""

from __future__ import annotations

import numpy as np
import pytest

import central_storage as cs
from central_storage.core.variable_sets import Numbers, VariableSets


def variables(count: int) -> list[cs.Variable]:
    """Equal ones, which must not be compared."""
    return [cs.Variable(np.zeros(2, np.float32)) for _ in range(count)]


@pytest.fixture
def sets() -> VariableSets:
    return VariableSets()


def test_a_set_is_found_by_its_variables_in_their_order(sets: VariableSets) -> None:
    a, b, c, d = variables(4)
    made = sets.add([a, b, c])
    assert sets.find([a, b, c]) is sets.find((a, b, c)) is made
    for others in ([a, d, c], [b, a, c], [a, b], [a, b, c, d], [d, b, c], []):
        assert sets.find(others) is None


def test_several_are_known_and_not_without_end(sets: VariableSets) -> None:
    many = [variables(2) for _ in range(40)]
    first = [sets.add(each) for each in many[:3]]
    assert [sets.find(each) for each in many[:3]] == first
    for each in many:
        sets.add(each)
    assert sum(sets.find(each) is not None for each in many) <= 16
    assert sets.find(many[-1]) is not None


def test_variables_with_a_constraint_are_told_apart(sets: VariableSets) -> None:
    [a] = variables(1)
    b = cs.Variable(np.zeros(2, np.float32), constraint=lambda value: value)
    assert sets.add([a]).is_free
    assert not sets.add([a, b]).is_free


def test_a_set_that_is_forgotten_is_not_found(sets: VariableSets) -> None:
    [a] = variables(1)
    sets.add([a])
    sets.forget()
    assert sets.find([a]) is None


def test_numbers_are_a_tuple_with_more_to_say() -> None:
    numbers = Numbers([5, 3, 5])
    assert numbers == (5, 3, 5)
    assert {(5, 3, 5): "found"}[numbers] == "found"
    assert numbers.ascending == (3, 5, 5)
    assert numbers.members == {3, 5}
