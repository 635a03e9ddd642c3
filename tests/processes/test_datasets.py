"""Data sets over a real service: every row reaches one replica once, and reading in a replica is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs
from cs_runtime.shared_memory.arena import Arena

BIG = 40_000  # float32 rows of a batch that go through shared memory


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="processes"), pytest.param(True, id="threads", marks=pytest.mark.slow)],
)
def two(request: pytest.FixtureRequest) -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=request.param) as strategy:
        yield connected(strategy)


def rows_seen(strategy: cs.CentralStorageStrategy, distributed: Any) -> list[list[Any]]:
    """Per step the rows of every replica, as the replicas saw them."""

    def look(batch: np.ndarray) -> np.ndarray:
        return np.array(batch)

    shares = [strategy.experimental_local_results(strategy.run(look, args=(batch,))) for batch in distributed]
    return [[share.tolist() for share in step] for step in shares]


def test_epochs_of_uneven_batches(two: cs.CentralStorageStrategy) -> None:
    dataset = cs.data.Dataset.range(7).batch(3)
    for options in (None, cs.InputOptions(experimental_fetch_to_device=False)):
        distributed = two.experimental_distribute_dataset(dataset, options)
        for _ in range(2):
            assert rows_seen(two, distributed) == [[[0, 1], [2]], [[3, 4], [5]], [[6], []]]


def test_from_function(two: cs.CentralStorageStrategy) -> None:
    def make(context: cs.InputContext) -> cs.data.Dataset:
        return cs.data.Dataset.range(7).batch(context.get_per_replica_batch_size(4))

    with pytest.warns(DeprecationWarning, match="use distribute_datasets_from_function"):
        by_old_name = two.experimental_distribute_datasets_from_function(make)
    for dataset in (two.distribute_datasets_from_function(make), by_old_name):
        assert rows_seen(two, dataset) == [[[0, 1], [2, 3]], [[4, 5], [6]]]


def test_numpy(two: cs.CentralStorageStrategy) -> None:
    with pytest.warns(DeprecationWarning, match="from_tensor_slices"):
        dataset = two.experimental_make_numpy_dataset({"x": np.arange(3)})
    assert [int(row["x"]) for row in dataset] == [0, 1, 2]


class Refilled:
    """So many batches, each written over the one before."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[np.ndarray]:
        batch = np.empty(BIG, np.float32)
        for number in range(self.count):
            batch[:] = number
            yield batch


@pytest.mark.parametrize("size", [1, 3])
def test_large_batches_that_the_source_writes_over(two: cs.CentralStorageStrategy, size: int) -> None:
    def extremes(batch: np.ndarray) -> tuple[float, float, int]:
        return float(batch.min()), float(batch.max()), len(batch)

    options = cs.InputOptions(experimental_per_replica_buffer_size=size)
    results = [two.run(extremes, args=(batch,)) for batch in two.experimental_distribute_dataset(Refilled(12), options)]
    assert [[part.values for part in result[:2]] for result in results] == [[(n, n), (n, n)] for n in range(12)]
    assert {result[2] for result in results} == {BIG // 2}


def test_what_was_read_ahead_lies_where_the_replicas_read_it(
    two: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[tuple[int, ...]] = []
    new = Arena.new

    def counting(arena: Arena, dtype: str, shape: tuple[int, ...]) -> Any:
        placed.append(shape)
        return new(arena, dtype, shape)

    monkeypatch.setattr(Arena, "new", counting)
    x = np.arange(6 * BIG, dtype=np.float32).reshape(6, 1, BIG).repeat(2, axis=1)
    batches = two.experimental_distribute_dataset(cs.data.Dataset.from_tensor_slices(x))
    sums = [two.run(lambda rows: rows.sum(dtype=np.float64), args=(batch,)).values for batch in batches]
    assert [list(step) for step in sums] == [[x[step, 0].sum(dtype=np.float64)] * 2 for step in range(6)]
    assert placed == [(x[0, 0].nbytes,)] * 2  # the shares of the first batch, which was not read ahead


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12's, for forking beside a thread
def test_a_forked_child_reads_data_sets_in_memory_of_its_own(two: cs.CentralStorageStrategy) -> None:
    batches = two.experimental_distribute_dataset([np.full(BIG, number) for number in range(4)])
    iterator = iter(batches)
    held = [next(iterator) for _ in range(2)]
    child = os.fork()
    if child == 0:
        try:
            numbers = [int(share[0]) for batch in batches for share in batch.values]
            os._exit(numbers != [0, 0, 1, 1, 2, 2, 3, 3])
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held += iterator
    assert [[share.min() for share in batch.values] for batch in held] == [[number] * 2 for number in range(4)]
    assert [[share.max() for share in batch.values] for batch in held] == [[number] * 2 for number in range(4)]


def test_texts_and_nests(two: cs.CentralStorageStrategy) -> None:
    texts = np.array(["a", "bc", "d"])
    batches = two.experimental_distribute_dataset(
        cs.data.Dataset.from_tensor_slices({"t": texts, "p": (np.arange(3), np.ones((3, 2)))}).batch(2)
    )

    def shape(batch: dict[str, Any]) -> tuple[str, int]:
        numbers, ones = batch["p"]
        return "".join(batch["t"].tolist()), int(ones.sum() + numbers.sum())

    results = [two.run(shape, args=(batch,)) for batch in batches]
    assert [[part.values if isinstance(part, cs.PerReplica) else part for part in r] for r in results] == [
        [("a", "bc"), (2, 3)],
        [("d", ""), (4, 0)],
    ]


def test_in_a_replica(two: cs.CentralStorageStrategy) -> None:
    dataset = cs.data.Dataset.range(4).batch(2)
    distributed = two.experimental_distribute_dataset(dataset)
    iterator = iter(distributed)
    for function in (
        lambda: next(iterator),
        lambda: iterator.get_next(),
        lambda: list(distributed),
        lambda: two.experimental_distribute_dataset(dataset),
        lambda: two.distribute_datasets_from_function(lambda _: dataset),
    ):
        for kind in (ValueError, RuntimeError, cs.errors.DatasetContextError):
            with pytest.raises(kind, match="args="):
                two.run(function)
    with pytest.raises(RuntimeError):
        two.run(lambda: two.extended.experimental_make_numpy_dataset(np.arange(2)))
    assert rows_seen(two, iterator) == [[[0], [1]], [[2], [3]]]


def test_a_plain_data_set_may_be_read_in_a_replica(two: cs.CentralStorageStrategy) -> None:
    dataset = cs.data.Dataset.range(4).batch(2)
    assert two.run(lambda: [batch.tolist() for batch in dataset]) == [[0, 1], [2, 3]]


def test_errors_of_the_source(two: cs.CentralStorageStrategy) -> None:
    for wrong in ([1, 2, 3], np.zeros(3), iter([np.zeros(2)])):
        with pytest.raises(AttributeError):
            two.experimental_distribute_dataset(wrong)
    with pytest.raises(IndexError):
        rows_seen(two, two.experimental_distribute_dataset(cs.data.Dataset.range(5)))
    with pytest.raises(ZeroDivisionError):
        two.distribute_datasets_from_function(lambda _: 1 // 0)


def test_many_steps_over_batches_that_are_read_ahead(two: cs.CentralStorageStrategy) -> None:
    """Each step sees its own batch whole, however many are under way and read ahead of them."""

    def extremes(batch: np.ndarray) -> np.ndarray:
        return np.array([batch.min(), batch.max()])

    options = cs.InputOptions(experimental_per_replica_buffer_size=2)
    distributed = two.experimental_distribute_dataset(Refilled(40), options)
    results = [[share.tolist() for share in result.values] for result in two.run_steps(extremes, distributed)]
    assert results == [[[number, number]] * 2 for number in range(40)]
