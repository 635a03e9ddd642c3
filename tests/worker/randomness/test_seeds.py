"""The random state of a replica is a function of (strategy seed, function, step, replica)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from central_storage.core.random_streams import Streams
from cs_worker.randomness import seeds
from cs_worker.randomness.seeds import Seeds, kept_random_state


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    restore = kept_random_state()
    yield
    restore()


def draw(
    seed: int = 7, function: str = "m.step", step: int = 5, replica: int = 1, path: tuple[int, ...] = ()
) -> tuple[float, float]:
    Seeds(lambda number: None).begin(Streams(seed, function, step, replica, path))
    return random.random(), float(np.random.rand())


def test_the_same_again() -> None:
    first = draw()
    random.random()
    np.random.rand()
    assert draw() == first


def test_where_the_words_of_python_are_not_found_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = draw()
    monkeypatch.setattr(seeds, "_words_of", lambda generator: None)
    assert draw() == wanted


def test_the_second_number_of_a_normal_pair_is_forgotten() -> None:
    made, drawn = Seeds(lambda number: None), []
    for _ in range(3):
        made.begin(Streams(7, "m.step", 5, 1))
        drawn.append(np.random.standard_normal(3).tolist())  # the generator keeps a fourth one
        assert np.random.get_state()[3] == 1
    assert drawn[0] == drawn[1] == drawn[2]


def test_the_states_are_those_that_python_and_numpy_read_back() -> None:
    draw()
    python, numpy = random.getstate(), np.random.get_state()
    draw()
    after = random.random(), np.random.rand()
    random.setstate(python)
    np.random.set_state(numpy)
    assert (random.random(), np.random.rand()) == after


def test_everything_else_differs() -> None:
    drawn = [
        draw(),
        draw(seed=8),
        draw(function="m.step2"),
        draw(step=6),
        draw(replica=0),
        draw(path=(2, 0)),
        draw(path=(0, 1)),
        draw(step=1, replica=5),
        draw(seed=72, function=":m.step"),
    ]
    assert len({number for pair in drawn for number in pair}) == 2 * len(drawn)


def test_the_values_do_not_depend_on_version_or_process() -> None:
    # Changing these changes the weights that users' scripts reproduce.
    assert draw() == (0.6737180479468852, 0.7250949783619863)


def test_the_largest_seed_and_step() -> None:
    most = (1 << 63) - 1, (1 << 62) - 1
    assert draw(most[0], step=most[1], replica=1023) != draw(most[0] - 1, step=most[1], replica=1023)


def test_each_generator_is_given_a_part_of_its_own() -> None:
    """Of one stream: no word is used twice, and a run of a seed takes the words that the next one does not."""
    given: list[int] = []
    seeds = Seeds(given.append)
    for step in range(3):
        seeds.begin(Streams(7, "m.step", step, 1))
        words = np.random.get_state()[1].tolist() + list(random.getstate()[1][:-1])
        assert len(set(words)) > 1240
    assert len(set(given)) == 3
    assert all(0 <= number < 1 << 32 for number in given)


def test_the_states_are_evenly_distributed() -> None:
    """Of 500 steps, the first number of each generator: what a function that draws once a run sees."""
    drawn = np.array([draw(step=step) for step in range(500)])
    for numbers in drawn.T:
        counts, _ = np.histogram(numbers, 10, (0, 1))
        assert ((counts - 50) ** 2 / 50).sum() < 30  # chi-squared with 9 degrees of freedom: p = 0.0004
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.15


def test_runs_of_several_functions_in_turns_draw_the_same_numbers_as_each_alone() -> None:
    runs = [(7, "m.step", 5, 1), (7, "m.step", 6, 1), (7, "m.evaluate", 6, 1), (7, "m.step", 6, 0), (8, "m.step", 6, 0)]
    runs += [(7, "m.step", 6, 1), (7, "m.step", 5, 1), (7, "m.step", 5, 1, (2, 0)), (7, "m.step", 7, 1, (2, 0))]
    wanted, made, drawn = [draw(*run) for run in runs], Seeds(lambda number: None), []
    for run in runs:
        made.begin(Streams(*run))
        drawn.append((random.random(), float(np.random.rand())))
    assert drawn == wanted


def test_state_is_kept_around_a_nested_run() -> None:
    Seeds(lambda number: None).begin(Streams(7, "m.step", 5, 0))
    restore = kept_random_state()
    expected = random.random(), float(np.random.rand())
    restore()
    draw(path=(0, 0))
    restore()
    assert (random.random(), float(np.random.rand())) == expected


@pytest.mark.parametrize("between", [np.random.rand, np.random.seed, np.random.standard_normal, random.random])
def test_what_was_drawn_before_changes_nothing(between: Callable[[], object]) -> None:
    wanted = draw(), np.random.standard_normal(3).tolist(), random.gauss()
    np.random.standard_normal()  # and keeps the second number of a pair
    random.gauss()  # as this does
    between()
    assert (draw(), np.random.standard_normal(3).tolist(), random.gauss()) == wanted


def test_another_generator_is_seeded() -> None:
    mine = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        wanted = draw()
        np.random.rand()
        assert draw() == wanted
        assert draw(step=6) != wanted
        normal = []
        for _ in range(2):
            draw()
            normal.append(np.random.standard_normal())  # the generator keeps a second one
        assert normal[0] == normal[1]
    finally:
        np.random.set_bit_generator(mine)


# --- a run that was foreseen ----------------------------------------------------------------------------------------


def numbers() -> tuple[float, ...]:
    return (*draws(), *draws())


def draws() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.standard_normal())


def test_a_run_that_was_foreseen_draws_the_same_numbers() -> None:
    made, given = Seeds(lambda number: None), list[int]()
    made.begin(Streams(7, "m.step", 5, 1))
    wanted = numbers()
    foreseeing = Seeds(given.append)
    for _ in range(2):
        foreseeing.foresee(Streams(7, "m.step", 5, 1))
        before = random.getstate(), np.random.get_state()[1].tolist()
        assert not given  # the device is left to the run itself
        foreseeing.begin(Streams(7, "m.step", 5, 1))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        assert numbers() == wanted
        assert len(given) == 1
        given.clear()


@pytest.mark.parametrize(
    "between",
    [
        random.random,
        np.random.rand,
        lambda: random.gauss(0, 1),
        lambda: np.random.standard_normal(),
        lambda: random.seed(1),
        lambda: np.random.seed(1),
        lambda: random.setstate((*random.getstate()[:2], 0.5)),
        lambda: np.random.set_bit_generator(np.random.MT19937(3)),
    ],
    ids=["random", "rand", "gauss", "normal", "seed", "numpy seed", "half of a pair", "bit generator"],
)
def test_what_was_drawn_or_set_after_it_was_foreseen_changes_nothing(between: Callable[[], object]) -> None:
    made = Seeds(lambda number: None)
    made.begin(Streams(7, "m.step", 5, 1))
    wanted = numbers()
    generator = np.random.get_bit_generator()
    try:
        made.foresee(Streams(7, "m.step", 5, 1))
        between()
        made.begin(Streams(7, "m.step", 5, 1))
        assert numbers() == wanted
    finally:
        np.random.set_bit_generator(generator)


def test_another_run_than_was_foreseen_draws_its_own_numbers() -> None:
    made = Seeds(lambda number: None)
    made.begin(Streams(7, "m.step", 6, 1))
    wanted = numbers()
    made.foresee(Streams(7, "m.step", 5, 1))
    made.begin(Streams(7, "m.step", 6, 1))
    assert numbers() == wanted
    made.begin(Streams(7, "m.step", 6, 1))  # what was foreseen counts once
    assert numbers() == wanted


def test_where_states_cannot_be_told_nothing_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "_words_of", lambda generator: None)
    made = Seeds(lambda number: None)
    made.begin(Streams(7, "m.step", 5, 1))
    wanted = numbers()
    made.foresee(Streams(7, "m.step", 5, 1))
    random.random()
    made.begin(Streams(7, "m.step", 5, 1))
    assert numbers() == wanted
