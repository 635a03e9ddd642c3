"""The random state of a replica is a function of (strategy seed, run, replica)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cs_proto.messages import RunId
from cs_worker.randomness.seeds import Seeds, kept_random_state


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    restore = kept_random_state()
    yield
    restore()


def draw(seed: int, run: RunId, replica: int) -> tuple[float, float]:
    Seeds(lambda number: None).begin(seed, run, replica)
    return random.random(), float(np.random.rand())


def test_the_same_again() -> None:
    first = draw(7, (5,), 1)
    random.random()
    np.random.rand()
    assert draw(7, (5,), 1) == first


def test_everything_else_differs() -> None:
    cases = [(7, (5,), 1), (8, (5,), 1), (7, (6,), 1), (7, (5,), 0), (7, (5, 2, 0), 1), (7, (5, 0, 1), 1), (7, (1,), 5)]
    drawn = [draw(*case) for case in cases]
    assert len({python for python, _ in drawn}) == len(cases)
    assert len({numpy for _, numpy in drawn}) == len(cases)


def test_the_values_do_not_depend_on_version_or_process() -> None:
    # Changing these changes the weights that users' scripts reproduce.
    assert draw(7, (5,), 1) == (0.42175003207640815, 0.14229256106166432)


def test_the_largest_seed() -> None:
    assert draw((1 << 63) - 1, (1 << 40,), 63) != draw((1 << 63) - 2, (1 << 40,), 63)


def test_state_is_kept_around_a_nested_run() -> None:
    Seeds(lambda number: None).begin(7, (5,), 0)
    restore = kept_random_state()
    expected = random.random(), float(np.random.rand())
    restore()
    draw(7, (5, 0, 0), 0)
    restore()
    assert (random.random(), float(np.random.rand())) == expected


@pytest.mark.parametrize("between", [np.random.rand, np.random.seed, np.random.standard_normal, random.random])
def test_what_was_drawn_before_changes_nothing(between: Callable[[], object]) -> None:
    wanted = draw(7, (5,), 1), np.random.standard_normal(3).tolist()
    np.random.standard_normal()  # and keeps the second number of a pair
    between()
    assert (draw(7, (5,), 1), np.random.standard_normal(3).tolist()) == wanted


def test_another_generator_is_seeded() -> None:
    mine = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        wanted = draw(7, (5,), 1)
        np.random.rand()
        assert draw(7, (5,), 1) == wanted
    finally:
        np.random.set_bit_generator(mine)
