"""``cs.random``: numbers by (seed, function, step, replica), the same however a run comes about."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs
from central_storage.core.random_streams import Streams, function_name

DEVICES = ["cpu:0", "cpu:1"]
Strategy = cs.CentralStorageStrategy


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[Strategy, Strategy]]:
    """One of processes and one of threads, of one seed."""
    with Strategy(DEVICES, seed=3) as processes, Strategy(DEVICES, seed=3, in_process=True) as threads:
        with processes.scope():
            one = cs.Variable(1.0)
        with threads.scope():
            other = cs.Variable(1.0)
        yield connected(processes, nested=True), connected(threads, nested=True)
        del one, other  # a checkpoint has the counts of a strategy of which it has a variable


@pytest.fixture(scope="module")
def threads(services: tuple[Strategy, Strategy]) -> Strategy:
    return services[1]


def shares(strategy: Strategy, function: Callable[..., Any], *args: Any) -> list[list[float]]:
    found = strategy.experimental_local_results(strategy.run(function, args))
    return [np.ravel(share).tolist() for share in found]


def drawn() -> list[float]:
    return [cs.random.generator().random(), np.random.random(), random.random()]


def test_numbers_follow_from_seed_function_step_and_replica(services: tuple[Strategy, Strategy]) -> None:
    def step() -> np.ndarray:
        return cs.random.generator().random(2)

    expected = [
        [Streams(3, function_name(step), number, replica).generator(None).random(2).tolist() for replica in range(2)]
        for number in range(3)
    ]
    for strategy in services:
        assert [shares(strategy, step) for _ in range(3)] == expected
    assert len({number for run in expected for share in run for number in share}) == 12


def test_a_run_for_which_another_was_foreseen_has_its_own_numbers(services: tuple[Strategy, Strategy]) -> None:
    def often() -> float:
        return float(cs.random.generator().random())

    def seldom() -> float:
        return float(cs.random.generator().random())

    order = [(often, 0), (often, 1), (often, 2), (seldom, 0), (often, 3), (often, 4), (often, 5), (seldom, 1)]
    for function, number in order:  # a worker foresees that a function comes a third time
        expected = [
            [Streams(3, function_name(function), number, replica).generator(None).random()] for replica in range(2)
        ]
        assert shares(services[0], function) == expected


def test_the_bits_stay() -> None:
    # Changing these changes what users' scripts reproduce.
    words = Streams(7, "m.step", 5, 1).generator(None).bit_generator.random_raw(2).tolist()
    assert words == [10815079454069221338, 1273134201249007624]


def test_an_evaluation_does_not_shift_a_training(threads: Strategy, tmp_path: Path) -> None:
    def train() -> np.ndarray:
        return np.array(drawn())

    def evaluate() -> float:
        return sum(drawn())

    threads.save(tmp_path)
    alone = [shares(threads, train) for _ in range(4)]
    threads.restore(tmp_path)
    between = []
    for _ in range(4):
        threads.run(evaluate)
        between.append(shares(threads, train))
    assert between == alone


def test_a_second_call_in_a_run_goes_on(threads: Strategy) -> None:
    def step() -> bool:
        first, second = cs.random.generator(), cs.random.generator()
        return first is second and first.random() != second.random()

    assert threads.run(step) is True


def test_a_step_can_be_given(services: tuple[Strategy, Strategy]) -> None:
    def step(number: Any) -> np.ndarray:
        given = cs.random.generator(number)
        assert cs.random.generator(step=int(number)) is given
        return given.random(2)

    for strategy in services:
        found = [shares(strategy, step, number) for number in (1, np.int64(1), np.array(0), 1, (1 << 64) - 1)]
        assert found[0] == found[1] == found[3]
        assert len({str(each) for each in found}) == 3
        assert found[2][1] == Streams(3, function_name(step), 0, 1).generator(None).random(2).tolist()


@pytest.mark.parametrize(
    ("step", "error"), [(-1, cs.errors.InvalidArgumentError), (1 << 64, ValueError), (1.5, TypeError), ("1", TypeError)]
)
def test_a_step_that_is_none_is_refused(threads: Strategy, step: Any, error: type[Exception]) -> None:
    def draw() -> None:
        cs.random.generator(step)

    with pytest.raises(error, match=r"step must be from 0|interpreted as an integer"):
        threads.run(draw)


def test_outside_a_run_the_error_names_the_remedy(threads: Strategy) -> None:
    def merge(strategy: Any) -> None:
        cs.random.generator()

    def in_merge() -> None:
        context = cs.get_replica_context()
        assert context is not None
        context.merge_call(merge)

    def in_thread() -> None:
        raised: list[Exception] = []

        def draw() -> None:
            try:
                cs.random.generator()
            except cs.errors.ContextError as error:
                raised.append(error)

        helper = threading.Thread(target=draw)
        helper.start()
        helper.join()
        raise raised[0]

    def in_scope() -> None:
        with threads.scope():
            cs.random.jax_key()

    calls: list[Callable[[], Any]] = [
        cs.random.generator,
        lambda: threads.run(in_merge),
        lambda: threads.run(in_thread),
    ]
    for call in calls:
        with pytest.raises(
            cs.errors.ContextError, match=r"cs\.random\.generator\(\) works in a function that a strategy"
        ):
            call()


def test_the_default_strategy_counts_too() -> None:
    def step() -> float:
        return cs.random.generator().random()

    default = cs.get_strategy()
    found = [default.run(step) for _ in range(3)]
    assert found == [Streams(0, function_name(step), number, 0).generator(None).random() for number in range(3)]


def test_nested_runs_have_streams_of_their_own(services: tuple[Strategy, Strategy]) -> None:
    def nested() -> float:
        return cs.random.generator().random()

    def merge(strategy: Any) -> Any:
        return [strategy.experimental_local_results(strategy.run(nested)) for _ in range(2)]

    def step() -> np.ndarray:
        context = cs.get_replica_context()
        assert context is not None
        first = cs.random.generator().random()
        inner = context.merge_call(merge)
        return np.array([first, *np.ravel(inner), cs.random.generator().random()])

    found = [[shares(strategy, step) for _ in range(2)] for strategy in services]
    assert found[0] == found[1]
    own = {number for run in found[0] for share in run for number in (share[0], share[-1])}
    inner = {number for run in found[0] for number in run[0][1:-1]}
    assert (len(own), len(inner)) == (8, 8)
    assert not own & inner


def test_steps_ahead_count_as_runs_do(services: tuple[Strategy, Strategy]) -> None:
    def step(batch: Any) -> float:
        return cs.random.generator().random()

    for strategy in services:
        data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(8).batch(2))
        found = [strategy.experimental_local_results(each) for each in strategy.run_steps(step, data)]
        assert found == [
            tuple(Streams(3, function_name(step), number, replica).generator(None).random() for replica in range(2))
            for number in range(4)
        ]


def test_neither_a_death_nor_a_restore_changes_a_number(services: tuple[Strategy, Strategy], tmp_path: Path) -> None:
    strategy, _ = services
    flag = tmp_path / "died"

    def step(may_die: bool) -> np.ndarray:
        numbers = np.array(drawn())
        context = cs.get_replica_context()
        assert context is not None
        context.all_reduce("SUM", numbers)
        if may_die and context.replica_id_in_sync_group == 1 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return numbers

    strategy.save(tmp_path)
    alone = [shares(strategy, step, False) for _ in range(3)]
    strategy.restore(tmp_path)
    again = [shares(strategy, step, True) for _ in range(3)]
    assert flag.exists()
    assert again == alone


def test_a_checkpoint_without_counts_is_restored_and_says_so(
    threads: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from central_storage.checkpoint import graph

    entries = graph.of_strategy
    with monkeypatch.context() as patch:
        patch.setattr(
            graph,
            "of_strategy",
            lambda strategy, way: {
                name.replace("steps", "draws"): entry for name, entry in entries(strategy, way).items()
            },
        )
        threads.save(tmp_path)
    before = threads.controller.steps()
    threads.restore(tmp_path)
    assert threads.controller.steps() == before
    assert "did not count the runs of each function" in caplog.text


class Callee:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


def test_names_of_functions() -> None:
    def named() -> None: ...

    here = __name__
    inner = f"{here}.test_names_of_functions.<locals>"
    cases: list[tuple[Any, str]] = [
        (named, f"{inner}.named"),
        (functools.partial(functools.partial(named)), f"{inner}.named"),
        (cs.function(named), f"{inner}.named"),
        (lambda: None, f"{inner}.<lambda>"),
        (Callee(), f"{here}.Callee"),
        (Callee, f"{here}.Callee"),
        (Callee().method, f"{here}.Callee.method"),
        (len, "builtins.len"),
        (np.random.random, "numpy.random.RandomState.random"),
    ]
    for function, name in cases:
        assert function_name(function) == name
    named.__qualname__ = "größe\udc80"
    assert function_name(named) == f"{here}.größe\\udc80"


def test_a_key_of_jax_is_made_of_the_same_numbers(threads: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for JAX, which shows what it is given; tests/interop has the library itself."""
    wrap = SimpleNamespace(wrap_key_data=lambda words, impl: (words.tolist(), str(words.dtype), impl))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(random=wrap))

    def step() -> Any:
        return cs.random.jax_key(), cs.random.jax_key(), cs.random.jax_key(7), cs.random.generator().random()

    found = threads.experimental_local_results(threads.run(step))
    keys = [tuple(key[0]) for share in found for key in share[:3]]
    assert len(set(keys)) == 6
    assert {key[1:] for share in found for key in share[:3]} == {("uint32", "threefry2x32")}
    assert found[0][3] == Streams(3, function_name(step), 0, 0).generator(None).random()


def test_without_jax_the_key_says_what_is_missing(threads: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)

    def step() -> None:
        cs.random.jax_key()

    with pytest.raises(ImportError, match="jax"):
        threads.run(step)
