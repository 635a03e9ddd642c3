"""What TensorFlow's pages about the strategy tell, in programs of our own: it is tested where the pages are not, too.

``test_pages.py`` runs the pages themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs


@pytest.fixture(scope="module")
def one() -> Iterator[cs.CentralStorageStrategy]:
    """``CentralStorageStrategy()`` on a machine without a GPU, and ``MirroredStrategy()``: one replica."""
    with cs.CentralStorageStrategy() as strategy:
        yield connected(strategy)


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    """The pages' two devices."""
    with cs.CentralStorageStrategy(compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0") as strategy:
        yield connected(strategy)


@pytest.fixture(scope="module")
def two_logical_devices() -> Iterator[cs.CentralStorageStrategy]:
    """Replicas of two logical devices each."""
    with cs.CentralStorageStrategy([("CPU:0", "CPU:1"), ("CPU:2", "CPU:3")], in_process=True) as strategy:
        yield connected(strategy)


@pytest.fixture(scope="module")
def eight_logical_devices() -> Iterator[cs.CentralStorageStrategy]:
    """One replica of eight logical devices."""
    with cs.CentralStorageStrategy([tuple(f"CPU:{n}" for n in range(8))], in_process=True) as strategy:
        yield connected(strategy)


def shares(strategy: cs.CentralStorageStrategy, value: Any) -> list[list[Any]]:
    return [np.asarray(share).tolist() for share in strategy.experimental_local_results(value)]


# --- the class ------------------------------------------------------------------------------------------------------


def test_class_for_example(one: cs.CentralStorageStrategy, two: cs.CentralStorageStrategy) -> None:
    for strategy, expected in ((one, [[[1, 2]], [[3, 4]], [[5]]]), (two, [[[1], [2]], [[3], [4]], [[5], []]])):
        ds = cs.data.Dataset.range(5).batch(2)
        dist_dataset = strategy.experimental_distribute_dataset(ds)
        with strategy.scope():

            @cs.function
            def train_step(val: Any) -> Any:
                return val + 1

            results = [shares(strategy, strategy.run(train_step, (x,))) for x in dist_dataset]
        assert results == expected


# --- data sets ------------------------------------------------------------------------------------------------------


def test_experimental_distribute_dataset(two: cs.CentralStorageStrategy) -> None:
    dataset = cs.data.Dataset.range(10).batch(2)
    dist_dataset = two.experimental_distribute_dataset(dataset)
    # The page prints "[0, 1], [2, 3], ...": the global batches, of which each replica gets its half.
    elements = [shares(two, x) for x in dist_dataset]
    assert elements == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]], [[8], [9]]]


@pytest.mark.parametrize(
    "way",
    [
        "distribute_datasets_from_function",
        pytest.param(
            "experimental_distribute_datasets_from_function",
            marks=pytest.mark.filterwarnings("ignore::DeprecationWarning"),
        ),
    ],
)
def test_distribute_datasets_from_function(way: str, two: cs.CentralStorageStrategy) -> None:
    def dataset_fn(input_context: cs.InputContext) -> cs.data.Dataset:
        batch_size = input_context.get_per_replica_batch_size(4)
        d = cs.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    for _, batch in zip(range(3), getattr(two, way)(dataset_fn), strict=False):
        assert [share.shape for share in two.experimental_local_results(batch)] == [(2, 1, 1), (2, 1, 1)]
        assert shares(two, two.run(lambda share: share.numpy().sum(), (batch,))) == [2.0, 2.0]
    distributed = two.distribute_datasets_from_function(lambda context: cs.data.Dataset.range(4), options=None)
    assert len(distributed.element_spec.values) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_experimental_make_numpy_dataset(two: cs.CentralStorageStrategy) -> None:
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = two.experimental_make_numpy_dataset(numpy_input)
    # The page leaves out the batch, without which there is nothing to split (rows are scalars).
    dist_dataset = two.experimental_distribute_dataset(dataset.batch(5))
    assert [shares(two, x) for x in dist_dataset] == [[[1.0] * 3, [1.0] * 2]] * 2
    with pytest.raises(IndexError):
        next(iter(two.experimental_distribute_dataset(dataset)))


# --- logical devices ------------------------------------------------------------------------------------------------


def test_experimental_assign_to_logical_device(two_logical_devices: cs.CentralStorageStrategy) -> None:
    strategy = two_logical_devices
    inputs = strategy.experimental_distribute_dataset(cs.data.Dataset.range(8).batch(4))
    iterator = iter(inputs)

    @cs.function
    def step_fn(inputs: Any) -> Any:
        output = np.add(inputs, inputs)
        return strategy.experimental_assign_to_logical_device(output, 0)

    with iterator:
        assert shares(strategy, strategy.run(step_fn, args=(next(iterator),))) == [[0, 2], [4, 6]]

        @cs.function
        def wrong_step(inputs: Any) -> Any:
            return strategy.experimental_assign_to_logical_device(inputs, 2)

        with pytest.raises(ValueError, match="2"):
            strategy.run(wrong_step, args=(next(iterator),))


def test_experimental_replicate_to_logical_devices(eight_logical_devices: cs.CentralStorageStrategy) -> None:
    strategy = eight_logical_devices
    images = np.arange(2 * 4 * 8 * 1, dtype=np.float32).reshape(2, 4, 8, 1)
    iterator = iter(strategy.experimental_distribute_dataset([(images, np.array([1, 2]))]))

    @cs.function
    def step_fn(inputs: Any) -> Any:
        images, labels = inputs
        # The page splits the whole of the inputs; its words and shapes mean the images.
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 4, 1])
        output = np.asarray(images).sum(axis=(1, 2, 3))
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return np.asarray(labels) * np.asarray(output)

    with iterator:
        loss = strategy.run(step_fn, args=(next(iterator),))
    np.testing.assert_allclose(loss, np.array([1, 2]) * images.sum(axis=(1, 2, 3)))


def test_experimental_split_to_logical_devices(eight_logical_devices: cs.CentralStorageStrategy) -> None:
    strategy = eight_logical_devices
    images = np.arange(2 * 4 * 8 * 3, dtype=np.float32).reshape(2, 4, 8, 3)
    iterator = iter(strategy.experimental_distribute_dataset([images]))

    @cs.function
    def step_fn(inputs: Any) -> Any:
        return strategy.experimental_split_to_logical_devices(inputs, [1, 2, 4, 1])

    with iterator:
        output = strategy.run(step_fn, args=(next(iterator),))
    np.testing.assert_array_equal(output, images)
    for partition, word in (
        ([1, 2, 4], "each of 4 axes"),
        ([1, 2, 2, 1], "8 devices"),
        ([1, 8, 1, 1], "equal parts"),
    ):
        with pytest.raises(ValueError, match=word):
            strategy.run(lambda: strategy.experimental_split_to_logical_devices(images, partition))  # noqa: B023


# --- reduce ---------------------------------------------------------------------------------------------------------


def test_reduce(two: cs.CentralStorageStrategy) -> None:
    # The page leaves out the batch, which TensorFlow refuses; its results are those of one batch of eight.
    ds = cs.data.Dataset.range(8).batch(8)
    dist_dataset = two.experimental_distribute_dataset(ds)
    with two.scope():

        @cs.function
        def train_step(val: Any) -> Any:
            return val

        for x in dist_dataset:
            result = two.run(train_step, (x,))

    assert two.reduce(cs.ReduceOp.SUM, result, axis=None).tolist() == [4, 6, 8, 10]
    # The page reduces the first result again, which is one value, and would count it once a replica (56).
    assert two.reduce(cs.ReduceOp.SUM, result, axis=0) == 28


def test_reduce_last_partial_batch(two: cs.CentralStorageStrategy) -> None:
    value = two.experimental_distribute_values_from_function(
        lambda ctx: (
            np.array([[0, 1, 2, 3], [4, 5]][ctx.replica_id_in_sync_group], np.float32)
            if ctx.replica_id_in_sync_group == 0
            else np.array([4, 5], np.float32)
        )
    )
    with pytest.raises(cs.errors.InvalidArgumentError):
        two.reduce(cs.ReduceOp.MEAN, value, axis=None)
    assert two.reduce(cs.ReduceOp.MEAN, value, axis=0) == np.float32(15 / 6)


# --- scope ----------------------------------------------------------------------------------------------------------


def test_scope(two: cs.CentralStorageStrategy) -> None:
    with two.scope() as strategy:
        assert strategy is two
        assert cs.get_strategy() is two
        assert cs.in_cross_replica_context()
        mirrored_variable = cs.Variable(1.0)
    # One copy, whatever the number of replicas: that is what a central storage is for.
    assert (mirrored_variable.shape, mirrored_variable.dtype, float(mirrored_variable)) == ((), np.float32, 1.0)
    assert two.extended.variable_created_in_scope(mirrored_variable)
    regular_variable = cs.Variable(1.0)
    assert (regular_variable.shape, regular_variable.dtype, float(regular_variable)) == ((), np.float32, 1.0)
    assert not two.extended.variable_created_in_scope(regular_variable)
    mirrored_variable.assign_add(1.0)  # reading and writing outside the scope work alike
    assert mirrored_variable.numpy() == 2.0


# --- local results ----------------------------------------------------------------------------------------------------


def test_experimental_local_results(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        variable = cs.Variable(1.0)
    assert two.experimental_local_results(variable) == (variable,)
    assert two.experimental_local_results(5) == (5,)
    replica_id = two.run(lambda: np.asarray(cs.get_replica_context().replica_id_in_sync_group), ())
    assert shares(two, replica_id) == [0, 1]
    called = two.extended.call_for_each_replica(lambda: np.float32(2.0))
    assert shares(two, called) == [2.0, 2.0]
