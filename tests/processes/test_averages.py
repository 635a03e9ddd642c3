"""Moving averages over a service: applied by all replicas, updated once, one object wherever they are."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs
from central_storage import errors
from central_storage.train import ExponentialMovingAverage


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 3], ids="replicas={}".format)
def strategy(request: pytest.FixtureRequest) -> Any:
    if request.param == 3:
        yield request.getfixturevalue("three")
    else:
        with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
            yield connected(strategy)


def variable(strategy: cs.CentralStorageStrategy, value: Any) -> cs.Variable:
    with strategy.scope():
        return cs.Variable(value, name="w", aggregation=cs.VariableAggregation.ONLY_FIRST_REPLICA)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_each_call_updates_once(strategy: cs.CentralStorageStrategy, frozen: bool, outside: bool) -> None:
    w = variable(strategy, np.array([0.0, 4.0], np.float32))
    if outside:
        average = ExponentialMovingAverage(0.75)
    else:
        with strategy.scope():
            average = ExponentialMovingAverage(0.75)

    def step(value: Any) -> Any:
        w.assign(value)
        average.apply([w])
        shadow = average.average(w)
        assert shadow is not None
        return shadow.numpy()

    step_ = cs.function(step) if frozen else step
    expected = np.array([2.0, 2.0])
    for k, value in enumerate(([2.0, 2.0], [6.0, -2.0], [0.0, 0.0])):
        seen = strategy.run(step_, args=(np.array(value, np.float32),))
        if k:
            expected -= 0.25 * (expected - value)
        for each in strategy.experimental_local_results(seen):
            np.testing.assert_allclose(each, expected, rtol=1e-6)
    shadow = average.average(w)
    assert shadow is not None
    assert shadow.name == average.average_name(w) == f"{w.name}/{average.name}"
    assert (shadow.trainable, shadow.shape, shadow.dtype) == (False, w.shape, w.dtype)
    np.testing.assert_allclose(shadow.numpy(), expected, rtol=1e-6)
    average.apply([w])  # in the script, once
    np.testing.assert_allclose(shadow.numpy(), 0.75 * expected, rtol=1e-6)
    assert [(a, b) for a, b in average.averages()] == [(w, shadow)]


def test_two_averages_of_one_variable(strategy: cs.CentralStorageStrategy) -> None:
    w = variable(strategy, 1.0)
    slow, fast = ExponentialMovingAverage(1.0), ExponentialMovingAverage(0.0)

    def step() -> None:
        slow.apply([w])
        fast.apply([w])
        w.assign(np.float32(5.0))
        slow.apply([w])
        fast.apply([w])

    strategy.run(step)
    found = [average.average(w) for average in (slow, fast)]
    assert [float(each) for each in found if each is not None] == [1.0, 5.0]
    assert slow.name != fast.name


def test_the_decay_grows_with_num_updates(strategy: cs.CentralStorageStrategy) -> None:
    w = variable(strategy, 0.0)
    with strategy.scope():
        updates = cs.Variable(0, aggregation=cs.VariableAggregation.ONLY_FIRST_REPLICA)
        average = ExponentialMovingAverage(0.9, num_updates=updates)
    average.apply([w])
    w.assign(1.0)
    strategy.run(lambda: average.apply([w]))
    shadow = average.average(w)
    assert shadow is not None
    assert float(shadow) == pytest.approx(0.9)
    updates.assign(10**6)
    strategy.run(lambda: average.apply([w]))
    assert float(shadow) == pytest.approx(0.91)


def test_it_is_one_object_in_a_process(strategy: cs.CentralStorageStrategy) -> None:
    average = ExponentialMovingAverage(0.5)
    w = variable(strategy, 2.0)

    def same(given: Any) -> Any:
        given.apply([w])
        return given, given is average

    assert strategy.run(same, args=(average,)) == (average, True)
    shadow = average.average(w)
    assert shadow is not None
    assert float(shadow) == 2.0


def test_there_is_none_before_it_is_applied(strategy: cs.CentralStorageStrategy) -> None:
    with strategy.scope():
        average = ExponentialMovingAverage(0.5)
    assert average.average(variable(strategy, 2.0)) is None
    assert average.averages() == []


def test_what_it_is_not_for(strategy: cs.CentralStorageStrategy) -> None:
    average = ExponentialMovingAverage(0.5)
    with strategy.scope():
        count = cs.Variable(1)
    with pytest.raises(TypeError, match="floating-point"):
        average.apply([count])
    with pytest.raises(TypeError, match="floating-point"):
        average.apply([np.ones(2)])  # type: ignore[list-item]
    with pytest.raises(errors.InvalidArgumentError, match="decay"):
        ExponentialMovingAverage(1.5)
    with pytest.raises(errors.ContextError, match="cannot be made in a replica"):
        strategy.run(lambda: ExponentialMovingAverage(0.5) and None)


def test_a_new_variable_of_an_old_name_has_an_average_of_its_own(strategy: cs.CentralStorageStrategy) -> None:
    average = ExponentialMovingAverage(0.5)

    def fresh(value: float) -> cs.Variable:
        with strategy.scope():
            made = cs.Variable(value, name="reused", aggregation=cs.VariableAggregation.ONLY_FIRST_REPLICA)
        strategy.run(lambda: average.apply([made]))  # only the replicas know the average
        return made

    first = fresh(1.0)
    name = first.name
    del first
    gc.collect()
    second = fresh(7.0)
    assert second.name == name
    for _ in range(2):
        strategy.run(lambda: average.apply([second]))
    found = average.average(second)
    assert found is not None
    assert float(found) == 7.0


def test_it_belongs_to_one_strategy(strategy: cs.CentralStorageStrategy) -> None:
    average = ExponentialMovingAverage(0.5)
    w = variable(strategy, 2.0)
    average.apply([w])
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as other:
        v = variable(other, 2.0)
        with pytest.raises(errors.ContextError, match="another strategy"):
            other.run(lambda: average.apply([v]))
        with pytest.raises(errors.ContextError, match="another strategy"):
            average.apply([v])


def test_a_local_variable_takes_its_average_along(strategy: cs.CentralStorageStrategy) -> None:
    w, average = cs.Variable(1.0), ExponentialMovingAverage(0.5)
    average.apply([w])
    w.assign(3.0)
    strategy.run(lambda: average.apply([w]))
    shadow = average.average(w)
    assert shadow is not None
    assert float(shadow) == 2.0
