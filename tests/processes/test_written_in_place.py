"""Native code writes in place to variables and arguments: never a crash, never another process's number, and an error
where a variable was written."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.replicas import context, replica
from tests.harness.services import connected

import central_storage as cs
from central_storage.errors import VariableWrittenError


@pytest.fixture(scope="module")
def threads() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        yield connected(strategy)


@pytest.fixture(scope="module", params=["processes", "threads"])
def either(request: pytest.FixtureRequest) -> cs.CentralStorageStrategy:
    """Two replicas, in processes and in threads of the script."""
    name = "two" if request.param == "processes" else "threads"
    return request.getfixturevalue(name)  # type: ignore[no-any-return]


def poke(view: Any, byte: int = 1) -> None:
    """Write all of it, as native code does that knows of no read-only memory."""
    array = np.asarray(view)
    ctypes.memset(array.__array_interface__["data"][0], byte, array.nbytes)


def local(strategy: cs.CentralStorageStrategy, value: Any) -> list[Any]:
    return [np.asarray(each).tolist() for each in strategy.experimental_local_results(value)]


@pytest.mark.parametrize("rows", [3, 30_000])
def test_a_write_of_one_replica_fails_the_run_for_all_and_counts_for_nothing(
    either: cs.CentralStorageStrategy, rows: int
) -> None:
    with either.scope():
        w = cs.Variable(np.ones(rows), name="written")
        other = cs.Variable(np.ones(rows), name="other")
        optimizer = cs.optimizers.SGD(0.5)

    def step(writer: int) -> float:
        seen = float(np.sum(w) + np.sum(other))
        if replica() == writer:
            poke(w)
        optimizer.apply_gradients([(np.ones(rows), w), (np.ones(rows), other)])
        return seen

    for writer in (0, 1):
        updates = optimizer.iterations.numpy()
        value = w.numpy()
        with pytest.raises(VariableWrittenError, match=f"replica {writer}: something wrote in place to .*'{w.name}'"):
            either.run(step, args=(writer,))
        assert optimizer.iterations.numpy() == updates
        assert (w.numpy() == value).all()
        assert local(either, either.run(step, args=(-1,))) == [2 * rows * value[0]] * 2
        assert (w.numpy() == other.numpy()).all()
        assert (w.numpy() == value - 1).all()


def test_a_write_to_a_large_variable_is_found_within_a_hundred_runs(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.ones(3 << 20), name="large")

    @cs.function
    def step(written: bool) -> float:
        if written and replica() == 1:
            poke(np.asarray(w)[1 << 20 : 2 << 20])
        return float(np.asarray(w)[1 << 20])

    def until_found() -> None:
        for _ in range(100):
            two.run(step, args=(False,))

    assert local(two, two.run(step, args=(False,))) == [1, 1]
    two.run(step, args=(True,))
    with pytest.raises(VariableWrittenError, match=r"replica 1: .*'large.*'.* wrong since run \d+ \(step \d+ of .*\)"):
        until_found()
    assert local(two, two.run(step, args=(False,))) == [1, 1]


def test_a_series_of_steps_ends_at_the_one_that_wrote(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.zeros(30_000), aggregation=cs.VariableAggregation.SUM)

    def step(x: np.ndarray) -> float:
        if int(x[0]) == 6:
            poke(w)
        w.assign_add(np.ones(30_000))
        return float(x[0])

    numbers = two.experimental_distribute_dataset(cs.data.Dataset.range(20).batch(2))
    done: list[Any] = []
    with pytest.raises(VariableWrittenError):
        done.extend(local(two, result) for result in two.run_steps(step, numbers))
    assert done == [[0, 1], [2, 3], [4, 5]]
    assert (w.numpy() == 6).all()
    assert local(two, two.run(step, args=(np.zeros(1),))) == [0, 0]


@pytest.mark.parametrize("rows", [5, 40_000])
def test_arguments_may_be_written_whatever_their_size(either: cs.CentralStorageStrategy, rows: int) -> None:
    x = np.arange(rows, dtype=np.float64)

    def step(x: np.ndarray, both: np.ndarray) -> list[float]:
        before = [float(x.sum()), float(both.sum())]
        context().all_reduce("SUM", np.ones(1))
        poke(x, replica())
        poke(both, 0)
        context().all_reduce("SUM", np.ones(1))
        return [*before, int(x.view(np.uint8)[-1]), float(both.sum())]

    for _ in range(3):
        result = either.run(step, args=(x, x.copy()))
        assert local(either, result) == [[x.sum(), x.sum(), k, 0.0] for k in range(2)]
    assert (x == np.arange(rows)).all()


def test_batches_that_are_read_ahead_may_be_written(two: cs.CentralStorageStrategy) -> None:
    """Batches in places that earlier ones have left, each seen as it was made and none through an old page."""
    shape = (2, 20_001)

    def step(x: np.ndarray) -> np.ndarray:
        seen = np.array([x.min(), x.max()])
        poke(x, 77)
        return seen

    for first in (0, 100):
        numbers = range(first, first + 12)
        batches = two.experimental_distribute_dataset([np.full(shape, number, np.float64) for number in numbers])
        results = two.run_steps(step, batches)
        assert [local(two, each) for each in results] == [[[number, number]] * 2 for number in numbers]


@pytest.mark.parametrize("rows", [5, 40_000])
def test_a_run_that_is_repeated_sees_the_original(mortal: cs.CentralStorageStrategy, rows: int, tmp_path: Path) -> None:
    flag = tmp_path / "died"
    with mortal.scope():
        w = cs.Variable(np.ones(rows))

    def step(x: np.ndarray) -> list[float]:
        seen = [float(x.sum()), float(np.sum(w))]
        if replica() == 1:
            poke(x)
            if not flag.exists():
                poke(w)
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return seen

    assert local(mortal, mortal.run(step, args=(np.ones(rows),))) == [[rows, rows]] * 2
    assert flag.exists()


def test_arguments_of_a_nested_run_may_be_written(two: cs.CentralStorageStrategy) -> None:
    """Those of replica 0 lie in its own arena, which it may write and which replica 1 reads."""

    def inner(x: np.ndarray) -> float:
        seen = float(x.sum())
        poke(x)
        context().all_reduce("SUM", np.ones(1))
        return seen + float(context().all_reduce("SUM", np.array([x[0]]))[0] == 2 * x[0])

    def merged(strategy: cs.CentralStorageStrategy) -> list[Any]:
        x = np.ones(40_000)
        results = [strategy.experimental_local_results(strategy.run(inner, args=(x,))) for _ in range(2)]
        return [float(value) for pair in results for value in pair] + [float(x.sum())]

    def step() -> Any:
        return context().merge_call(merged)

    assert local(two, two.run(step)) == [[40_001.0] * 4 + [40_000.0]] * 2
