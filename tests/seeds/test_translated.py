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


def test_the_spec_of_the_elements_is_a_signature(two: cs.CentralStorageStrategy) -> None:
    dataset = cs.data.Dataset.from_tensors(([1.0], [2])).repeat(100).batch(16)
    with iter(two.experimental_distribute_dataset(dataset)) as iterator:

        @cs.function(input_signature=[iterator.element_spec])
        def train_step(distributed_inputs: Any) -> Any:
            return two.run(lambda inputs: inputs[0].numpy().sum(), (distributed_inputs,))

        floats = "TensorSpec(shape=(None, 1), dtype=np.float32, name=None)"
        assert repr(iterator.element_spec[0]) == f"PerReplicaSpec({floats}, {floats})"
        assert repr(train_step(next(iterator))) == (
            "PerReplica:{\n"
            "  0: <cs.Tensor: shape=(), dtype=float32, numpy=8.0>,\n"
            "  1: <cs.Tensor: shape=(), dtype=float32, numpy=8.0>\n"
            "}"
        )


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
