"""Metrics fed by replicas: they count every example once, however unevenly the rows were shared out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs
from central_storage import errors


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 3], ids="replicas={}".format)
def strategy(request: pytest.FixtureRequest) -> Any:
    if request.param == 3:
        yield request.getfixturevalue("three")
    else:
        with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
            yield connected(strategy)


def rid() -> int:
    context = cs.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def test_a_mean_is_that_of_all_rows(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.scope():
        mean, total = cs.metrics.Mean(), cs.metrics.Sum()
    rows = np.arange(10, dtype=np.float32)

    def feed(batch: np.ndarray) -> None:
        mean.update_state(batch)
        total.update_state(batch)

    for batch in strategy.experimental_distribute_dataset(cs.data.Dataset.from_tensor_slices(rows).batch(7)):
        strategy.run(feed, args=(batch,))  # with three replicas the second batch is 1, 1, 1 and the first 3, 3, 1
    assert (mean.result().dtype, mean.result().shape, float(mean.result())) == (np.float32, (), 4.5)
    assert float(total.result()) == 45.0
    assert [float(v.numpy()) for v in mean.variables] == [45.0, 10.0]
    mean.update_state(np.array([100.0]), sample_weight=5)
    assert float(mean.result()) == pytest.approx((45 + 500) / 15)
    mean.reset_state()
    assert [float(v.numpy()) for v in mean.variables] == [0.0, 0.0]
    assert float(mean.result()) == 0.0


def test_a_replica_reads_what_all_have_brought(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.scope():
        mean = cs.metrics.Mean()

    def feed() -> Any:
        mean.reset_state()
        mean.update_state(np.full(rid() + 1, 1.0 + rid()))
        return mean.result()

    n = strategy.num_replicas_in_sync
    rows = [k + 1 for k in range(n) for _ in range(k + 1)]
    for found in strategy.experimental_local_results(strategy.run(feed)):
        assert float(found) == pytest.approx(np.mean(rows))


def test_accuracies(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.scope():
        exact, sparse = cs.metrics.Accuracy(), cs.metrics.SparseCategoricalAccuracy("top")
    labels = np.array([0, 1, 2, 2, 1, 0, 0])
    chances = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 1, 1]]

    def feed(batch: Any) -> None:
        truth, predicted = batch
        sparse.update_state(truth, predicted)
        sparse.update_state(truth[:, None], predicted)
        exact.update_state(truth, predicted.argmax(-1))

    whole = cs.data.Dataset.from_tensor_slices((labels, chances)).batch(7)
    for batch in strategy.experimental_distribute_dataset(whole):
        strategy.run(feed, args=(batch,))
    assert float(exact.result()) == float(sparse.result()) == pytest.approx(4 / 7)
    assert [v.name.split("/")[0] for v in (*exact.variables, *sparse.variables)] == ["accuracy"] * 2 + ["top"] * 2


def test_a_metric_is_one_object_in_a_process(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.scope():
        mean = cs.metrics.Mean()
    holder = {"mean": mean}

    def same(given: Any) -> Any:
        return given, given is mean, given is holder["mean"]

    back, *facts = strategy.run(same, args=(mean,))
    assert back is mean
    assert facts == [True, True]

    def merge(strategy: Any, given: Any) -> Any:
        given.update_state(np.array([2.0]))
        return given

    def ask() -> Any:
        context = cs.get_replica_context()
        assert context is not None
        merged = context.merge_call(merge, (mean,))
        return merged, merged is mean, merged.result()

    found, is_it, value = strategy.run(ask)
    assert (found, is_it) == (mean, True)
    assert {float(x) for x in strategy.experimental_local_results(value)} == {2.0}


def test_a_metric_made_in_a_replica_comes_back(strategy: cs.CentralStorageStrategy) -> None:
    def make() -> Any:
        made = cs.metrics.Mean("inside")
        made.update_state(np.array([1.0 + rid()]))
        return made

    made = strategy.run(make)
    assert isinstance(made, cs.metrics.Mean)
    assert float(made.result()) == (strategy.num_replicas_in_sync + 1) / 2
    made.update_state(np.array([7.0]))


def test_a_metric_of_the_users(strategy: cs.CentralStorageStrategy) -> None:
    class Extremes(cs.metrics.Metric):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.limit = limit
            self.above = self.add_weight("above", (2,))

        def update_state(self, values: Any) -> None:
            self.above.assign_add(np.array([(values > self.limit).sum(), values.size], np.float32))

        def result(self) -> Any:
            above, all_ = self.above.numpy()
            return above / all_

    with strategy.scope():
        metric = Extremes(2.5)

    def feed() -> Any:
        metric.update_state(np.arange(5.0))
        return metric

    assert strategy.run(feed) is metric
    assert float(metric.result()) == pytest.approx(0.4)
    metric.limit = 3.5  # like every captured value, that of the moment of the call
    strategy.run(feed)
    assert float(metric.result()) == pytest.approx(0.3)


def test_a_metric_made_of_metrics(strategy: cs.CentralStorageStrategy) -> None:
    class Both(cs.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [cs.metrics.Mean(), cs.metrics.Sum()]

        def update_state(self, values: Any) -> None:
            for part in self.parts:
                part.update_state(values)

        def result(self) -> Any:
            return np.stack([part.result() for part in self.parts])

    with strategy.scope():
        inside = Both()
    outside = Both()

    def feed() -> Any:
        for metric in (inside, outside):
            metric.update_state(np.full(2, 3.0))
        return inside, outside

    n = strategy.num_replicas_in_sync
    for _ in range(2):
        assert strategy.run(feed) == (inside, outside)
        for metric in (inside, outside):
            assert metric.result().tolist() == [3, 6 * n]
            assert all(variable.strategy is strategy for variable in metric.variables)
            metric.reset_state()
            assert metric.result().tolist() == [0, 0]


def test_nobody_else_takes_a_metric_along(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.scope():
        mean = cs.metrics.Mean()
    with pytest.raises(TypeError, match="state in its service"):
        pickle.dumps(mean)
    assert copy.copy(mean) is mean


def test_a_metric_of_another_strategy(strategy: cs.CentralStorageStrategy) -> None:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as other:
        with other.scope():
            mean = cs.metrics.Mean()
        with pytest.raises(errors.ContextError, match="another strategy"):
            strategy.run(lambda: mean.update_state(np.ones(1)))


@pytest.mark.parametrize(
    ("values", "weights", "mean", "total"),
    [
        ([1.0, 3.0], 0.5, 2.0, 2.0),
        ([1.0, 3.0], [1.0, 0.0], 1.0, 1.0),
        ([[1.0, 3.0], [5.0, 7.0]], [1.0, 0.0], 2.0, 4.0),
        ([[1.0, 3.0], [5.0, 7.0]], [[1.0], [1.0]], 4.0, 16.0),
        ([[1.0], [3.0]], [0.0, 1.0], 3.0, 3.0),
        ([1.0, 3.0], [[0.0], [1.0]], 3.0, 3.0),
        (True, None, 1.0, 1.0),
        ([], None, 0.0, 0.0),
    ],
)
def test_weights(strategy: cs.CentralStorageStrategy, values: Any, weights: Any, mean: float, total: float) -> None:
    with strategy.scope():
        both = cs.metrics.Mean(dtype="float64"), cs.metrics.Sum(dtype="float64")
    for metric in both:
        metric.update_state(values, weights)
    assert [float(metric.result()) for metric in both] == [mean, total]


def test_what_does_not_fit(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.scope():
        mean, exact, sparse = cs.metrics.Mean(), cs.metrics.Accuracy(), cs.metrics.SparseCategoricalAccuracy()
        with pytest.raises(errors.InvalidArgumentError, match="floating-point"):
            cs.metrics.Mean(dtype="int32")
    with pytest.raises(errors.InvalidArgumentError, match="sample_weight"):
        mean.update_state([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(errors.InvalidArgumentError, match="must have the same shape"):
        exact.update_state([1, 2], [1, 2, 3])
    with pytest.raises(errors.InvalidArgumentError, match="one more axis, the classes"):
        sparse.update_state([1, 2], [1, 2])
    assert float(mean.result()) == 0.0


def test_a_metric_made_outside_every_scope(strategy: cs.CentralStorageStrategy) -> None:
    mean = cs.metrics.Mean()
    mean.update_state([1.0, 2.0])
    assert float(mean.result()) == 1.5

    def feed() -> Any:
        mean.update_state(np.array([3.0 + rid()]))
        return mean.result()

    n = strategy.num_replicas_in_sync
    expected = np.mean([1.0, 2.0, *(3.0 + k for k in range(n))])
    for found in strategy.experimental_local_results(strategy.run(feed)):
        assert float(found) == pytest.approx(expected)  # in every replica that of all
    assert float(mean.result()) == pytest.approx(expected)
    with (
        cs.CentralStorageStrategy(["cpu:0"], in_process=True) as other,
        pytest.raises(errors.ContextError, match="another strategy"),
    ):
        other.run(feed)


def test_rows_of_a_table(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.scope():
        table = cs.Variable(np.arange(12, dtype=np.float32).reshape(4, 3))
    ids = np.array([[3, 0], [3, 3]])
    np.testing.assert_array_equal(cs.nn.embedding_lookup(table, ids), table.numpy()[ids])
    seen = strategy.run(lambda: cs.nn.embedding_lookup(table, ids))
    for each in strategy.experimental_local_results(seen):
        np.testing.assert_array_equal(each, table.numpy()[ids])
    with pytest.raises(errors.InvalidArgumentError, match=r"embedding_lookup: row 4 is outside \[0, 4\)"):
        strategy.run(lambda: cs.nn.embedding_lookup(table, [4]))


def test_an_area_is_that_of_all_rows(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.scope():
        area, precision = cs.metrics.AUC(20), cs.metrics.Precision()
    labels = np.arange(23) % 3 == 0
    chances = (np.arange(23) * 7 % 23 / 22).astype(np.float32)

    def feed(batch: Any) -> Any:
        area.update_state(*batch)
        return precision(*batch)

    whole = cs.data.Dataset.from_tensor_slices((labels, chances)).batch(9)
    for batch in strategy.experimental_distribute_dataset(whole):
        last = strategy.run(feed, args=(batch,))
    here = cs.metrics.AUC(20), cs.metrics.Precision()
    assert float(area.result()) == float(here[0](labels, chances))
    assert float(precision.result()) == float(here[1](labels, chances))
    assert {float(x) for x in strategy.experimental_local_results(last)} == {float(precision.result())}
