"""Every example of the five API pages of CentralStorageStrategy (r2.0, r2.2, r2.3 and r2.4 in two renderings).

TensorFlow becomes NumPy, ``tf.function`` is ``cs.function``, ``tf.device`` is ``cs.device``, and a GPU is a CPU. One
test for each example, called after its page and section, with the result that the page prints. Where a page prints
what TensorFlow itself never did, the test says so and asks for what it does.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs

R20, R22, R23, R24, R24_MARKDOWN = "r2.0", "r2.2", "r2.3", "r2.4", "r2.4-markdown"
PAGES = (R20, R22, R23, R24, R24_MARKDOWN)


def on(*pages: str) -> Callable[[Any], Any]:
    """One test for each of the pages that have the example."""
    return pytest.mark.parametrize("page", pages)


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
def four() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"], in_process=True) as strategy:
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


@contextmanager
def spelling(is_deprecated: bool) -> Iterator[None]:
    """Older names may warn, once a process, and say which name to use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert all(issubclass(each.category, DeprecationWarning) for each in caught), list(map(str, caught))
    assert is_deprecated or not caught


def run(strategy: cs.CentralStorageStrategy, page: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """By the name that the page gives it."""
    with spelling(page == R20):
        return strategy.experimental_run_v2(fn, args=args) if page == R20 else strategy.run(fn, args=args)


def shares(strategy: cs.CentralStorageStrategy, value: Any) -> list[list[Any]]:
    return [np.asarray(share).tolist() for share in strategy.experimental_local_results(value)]


# --- the class ------------------------------------------------------------------------------------------------------


@on(*PAGES)
def test_class_for_example(page: str, one: cs.CentralStorageStrategy, two: cs.CentralStorageStrategy) -> None:
    for strategy, expected in ((one, [[[1, 2]], [[3, 4]], [[5]]]), (two, [[[1], [2]], [[3], [4]], [[5], []]])):
        ds = cs.data.Dataset.range(5).batch(2)
        dist_dataset = strategy.experimental_distribute_dataset(ds)
        with strategy.scope():

            @cs.function
            def train_step(val: Any) -> Any:
                return val + 1

            results = [shares(strategy, run(strategy, page, train_step, (x,))) for x in dist_dataset]
        assert results == expected


@on(*PAGES)
def test_class_attributes(page: str, two: cs.CentralStorageStrategy) -> None:
    assert two.num_replicas_in_sync == 2
    assert isinstance(two.extended, cs.StrategyExtended)


@on(R23, R24, R24_MARKDOWN)
def test_cluster_resolver(page: str, one: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["localhost:12345", "localhost:23456"], "ps": ["localhost:34567"]}
    monkeypatch.setitem(
        os.environ, "TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    )
    # A strategy of one machine has none, whatever the environment says.
    assert one.cluster_resolver is None


# --- data sets ------------------------------------------------------------------------------------------------------


@on(*PAGES)
def test_experimental_distribute_dataset(page: str, two: cs.CentralStorageStrategy) -> None:
    dataset = cs.data.Dataset.range(10).batch(2)
    dist_dataset = two.experimental_distribute_dataset(dataset)
    # The page prints "[0, 1], [2, 3], ...": the global batches, of which each replica gets its half.
    elements = [shares(two, x) for x in dist_dataset]
    assert elements == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]], [[8], [9]]]


def _from_function(strategy: cs.CentralStorageStrategy, page: str, distribute: Callable[..., Any]) -> None:
    global_batch_size = 4

    def dataset_fn(input_context: cs.InputContext) -> cs.data.Dataset:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = cs.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    def replica_fn(batch: Any) -> Any:
        return batch.sum()

    with spelling(page != R24 and page != R24_MARKDOWN):
        inputs = distribute(dataset_fn)
    for _, batch in zip(range(3), inputs, strict=False):
        assert [share.shape for share in strategy.experimental_local_results(batch)] == [(2, 1, 1), (2, 1, 1)]
        replica_results = run(strategy, page, replica_fn, (batch,))
        assert shares(strategy, replica_results) == [2.0, 2.0]


@on(R20, R22, R23)
def test_experimental_distribute_datasets_from_function(page: str, two: cs.CentralStorageStrategy) -> None:
    _from_function(two, page, two.experimental_distribute_datasets_from_function)


@on(R24, R24_MARKDOWN)
def test_distribute_datasets_from_function(page: str, two: cs.CentralStorageStrategy) -> None:
    _from_function(two, page, two.distribute_datasets_from_function)
    distributed = two.distribute_datasets_from_function(lambda context: cs.data.Dataset.range(4), options=None)
    assert len(distributed.element_spec.values) == 2


@on(R20, R22, R23)
def test_experimental_make_numpy_dataset(page: str, two: cs.CentralStorageStrategy) -> None:
    numpy_input = np.ones([10], dtype=np.float32)
    with spelling(is_deprecated=True):
        dataset = two.experimental_make_numpy_dataset(numpy_input)
    # The page leaves out the batch, without which there is nothing to split (rows are scalars).
    dist_dataset = two.experimental_distribute_dataset(dataset.batch(5))
    assert [shares(two, x) for x in dist_dataset] == [[[1.0] * 3, [1.0] * 2]] * 2
    with pytest.raises(IndexError):
        next(iter(two.experimental_distribute_dataset(dataset)))


# --- values from a function -----------------------------------------------------------------------------------------


def one_or_two(page: str, one: cs.CentralStorageStrategy, two: cs.CentralStorageStrategy) -> cs.CentralStorageStrategy:
    """``MirroredStrategy()`` in r2.2 and r2.3, ``MirroredStrategy(["GPU:0", "GPU:1"])`` in r2.4."""
    return one if page in (R22, R23) else two


@on(R22, R23, R24, R24_MARKDOWN)
def test_experimental_distribute_values_from_function_1_constant(
    page: str, one: cs.CentralStorageStrategy, two: cs.CentralStorageStrategy
) -> None:
    strategy = one_or_two(page, one, two)

    def value_fn(ctx: cs.ValueContext) -> Any:
        return cs.convert_to_tensor(1.0)

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert [(value.shape, value.dtype, float(value)) for value in local_result] == [
        ((), np.float32, 1.0)
    ] * strategy.num_replicas_in_sync


@on(R22, R23, R24, R24_MARKDOWN)
def test_experimental_distribute_values_from_function_2_by_replica_id(
    page: str, one: cs.CentralStorageStrategy, two: cs.CentralStorageStrategy
) -> None:
    strategy = one_or_two(page, one, two)
    array_value = np.array([3.0, 2.0, 1.0])

    def value_fn(ctx: cs.ValueContext) -> Any:
        return array_value[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert local_result == ((3.0,) if strategy is one else (3.0, 2.0))


@on(R22, R23, R24, R24_MARKDOWN)
def test_experimental_distribute_values_from_function_3_number_of_replicas(
    page: str, one: cs.CentralStorageStrategy, two: cs.CentralStorageStrategy
) -> None:
    strategy = one_or_two(page, one, two)

    def value_fn(ctx: cs.ValueContext) -> Any:
        return ctx.num_replicas_in_sync

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert local_result == ((1,) if strategy is one else (2, 2))


@on(R22, R23, R24, R24_MARKDOWN)
def test_experimental_distribute_values_from_function_4_on_devices(page: str, two: cs.CentralStorageStrategy) -> None:
    worker_devices = two.extended.worker_devices
    multiple_values = []
    for i in range(two.num_replicas_in_sync):
        with cs.device(worker_devices[i]):
            multiple_values.append(cs.convert_to_tensor(1.0))

    def value_fn(ctx: cs.ValueContext) -> Any:
        # The page of r2.2 says ctx.replica_id, which never was.
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = two.experimental_distribute_values_from_function(value_fn)
    assert two.experimental_local_results(distributed_values) == (1.0, 1.0)
    assert two.reduce("SUM", distributed_values, axis=None) == 2.0


# --- logical devices ------------------------------------------------------------------------------------------------


@on(R22, R23)
def test_experimental_assign_to_logical_device(page: str, two_logical_devices: cs.CentralStorageStrategy) -> None:
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


@on(R22)
def test_experimental_replicate_to_logical_devices(page: str, eight_logical_devices: cs.CentralStorageStrategy) -> None:
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


@on(R22)
def test_experimental_split_to_logical_devices(page: str, eight_logical_devices: cs.CentralStorageStrategy) -> None:
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


# --- gather ---------------------------------------------------------------------------------------------------------


@on(R24, R24_MARKDOWN)
def test_gather(page: str, two: cs.CentralStorageStrategy) -> None:
    distributed_values = two.experimental_distribute_values_from_function(lambda _: np.array([[1], [2]], np.int32))

    @cs.function
    def gathered() -> Any:
        return two.gather(distributed_values, axis=0)

    result = gathered()
    assert result.dtype == np.int32
    assert result.tolist() == [[1], [2], [1], [2]]


@on(R24, R24_MARKDOWN)
def test_gather_more_combinations(page: str, four: cs.CentralStorageStrategy) -> None:
    single_tensor = np.arange(6, dtype=np.int32).reshape(1, 2, 3)
    distributed_values = four.experimental_distribute_values_from_function(lambda _: single_tensor.copy())

    @cs.function
    def gathered(axis: int) -> Any:
        return four.gather(distributed_values, axis=axis)

    assert gathered(0).tolist() == [[[0, 1, 2], [3, 4, 5]]] * 4
    assert gathered(1).tolist() == [[[0, 1, 2], [3, 4, 5]] * 4]
    assert gathered(2).tolist() == [[[0, 1, 2] * 4, [3, 4, 5] * 4]]
    assert [gathered(axis).shape for axis in range(3)] == [(4, 2, 3), (1, 8, 3), (1, 2, 12)]


# --- reduce ---------------------------------------------------------------------------------------------------------


@on(R20, R22, R24, R24_MARKDOWN)
def test_reduce(page: str, two: cs.CentralStorageStrategy) -> None:
    # The page leaves out the batch, which TensorFlow refuses; its results are those of one batch of eight.
    ds = cs.data.Dataset.range(8).batch(8)
    dist_dataset = two.experimental_distribute_dataset(ds)
    with two.scope():

        @cs.function
        def train_step(val: Any) -> Any:
            return val

        for x in dist_dataset:
            result = run(two, page, train_step, (x,))

    assert two.reduce(cs.ReduceOp.SUM, result, axis=None).tolist() == [4, 6, 8, 10]
    # The page reduces the first result again, which is one value, and would count it once a replica (56).
    assert two.reduce(cs.ReduceOp.SUM, result, axis=0) == 28


@on(R20, R22, R24, R24_MARKDOWN)
def test_reduce_last_partial_batch(page: str, two: cs.CentralStorageStrategy) -> None:
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


@on(R24, R24_MARKDOWN)
def test_scope(page: str, two: cs.CentralStorageStrategy) -> None:
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


@on(R20, R22)
def test_scope_selects_the_strategy(page: str, two: cs.CentralStorageStrategy) -> None:
    assert not cs.has_strategy()
    with two.scope():
        assert cs.has_strategy()
        assert cs.get_replica_context() is None
    assert not cs.has_strategy()


# --- local results ----------------------------------------------------------------------------------------------------


@on(*PAGES)
def test_experimental_local_results(page: str, two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        variable = cs.Variable(1.0)
    assert two.experimental_local_results(variable) == (variable,)
    assert two.experimental_local_results(5) == (5,)
    replica_id = run(two, page, lambda: np.asarray(cs.get_replica_context().replica_id_in_sync_group), ())
    assert shares(two, replica_id) == [0, 1]
    called = two.extended.call_for_each_replica(lambda: np.float32(2.0))
    assert shares(two, called) == [2.0, 2.0]
