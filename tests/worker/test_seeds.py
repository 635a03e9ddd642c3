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
    return drawn(Seeds(lambda number: None), seed, run, replica)


def drawn(seeds: Seeds, seed: int, run: RunId, replica: int) -> tuple[float, float]:
    seeds.begin(seed, run, replica)
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


def ignored() -> None:
    """Nothing is drawn."""


@pytest.mark.parametrize("expected", [(7, (5,), 1), (7, (6,), 1), (8, (5,), 1)], ids=["it", "another run", "seed"])
@pytest.mark.parametrize("between", [ignored, np.random.rand, np.random.seed, np.random.standard_normal, random.random])
def test_what_was_expected_and_drawn_meanwhile_changes_nothing(
    expected: tuple[int, RunId, int], between: Callable[[], object]
) -> None:
    wanted = draw(7, (5,), 1), float(np.random.standard_normal())
    seeds = Seeds(lambda number: None)
    np.random.standard_normal()  # and keeps a second one
    seeds.expect(*expected)
    between()
    assert (drawn(seeds, 7, (5,), 1), float(np.random.standard_normal())) == wanted
    assert drawn(seeds, 7, (5,), 1) == wanted[0]


def test_what_was_expected_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = draw(7, (5,), 1)
    seeds = Seeds(lambda number: None)
    seeds.expect(7, (5,), 1)
    with monkeypatch.context() as patched:
        patched.delattr(np.random, "seed")
        assert drawn(seeds, 7, (5,), 1) == wanted


def test_the_runs_after_what_was_expected_are_as_ever() -> None:
    seeds = Seeds(lambda number: None)
    for number in range(5, 25):
        seeds.expect(7, (number,), 1)
        wanted = draw(7, (number,), 1), float(np.random.standard_normal())
        assert (drawn(seeds, 7, (number,), 1), float(np.random.standard_normal())) == wanted


@pytest.mark.parametrize("runs_between", [0, 1])
def test_what_was_kept_of_a_pair_is_forgotten(runs_between: int) -> None:
    seeds = Seeds(lambda number: None)
    seeds.expect(7, (5,), 1)
    for number in range(5, 6 + runs_between):
        seeds.begin(7, (number,), 1)  # where nothing is drawn
    np.random.standard_normal()  # and keeps a second one
    seeds.begin(7, (8,), 1)
    found = np.random.standard_normal(3).tolist()
    Seeds(lambda number: None).begin(7, (8,), 1)
    assert np.random.standard_normal(3).tolist() == found


def test_another_generator_is_seeded_when_the_run_begins() -> None:
    mine = np.random.get_bit_generator()
    seeds = Seeds(lambda number: None)
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        wanted = draw(7, (5,), 1)
        seeds.expect(7, (5,), 1)
        np.random.rand()
        assert drawn(seeds, 7, (5,), 1) == wanted
    finally:
        np.random.set_bit_generator(mine)
