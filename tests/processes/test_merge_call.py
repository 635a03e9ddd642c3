"""merge_call over a real service: replica 0's function, once, in the cross-replica context, for all replicas."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from tests.harness.replicas import context, replica

import central_storage as cs
from central_storage import errors


@pytest.fixture
def total(two: cs.CentralStorageStrategy) -> cs.Variable:
    with two.scope():
        return cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)


def test_arguments_arrive_regrouped_and_each_replica_gets_its_share(two: cs.CentralStorageStrategy) -> None:
    def merge(strategy: Any, value: Any, same: str, *, key: Any) -> Any:
        assert strategy is cs.get_strategy()
        assert cs.in_cross_replica_context()
        assert cs.get_replica_context() is None
        assert isinstance(value, cs.PerReplica)
        assert same == "same"
        return cs.PerReplica([(os.getpid(), k, v.sum()) for k, v in zip(key.values, value.values, strict=True)])

    def step() -> Any:
        return context().merge_call(merge, args=(np.full(2, replica()), "same"), kwargs={"key": 10 * replica()})

    pids, keys, sums = two.run(step)
    workers = [each.pid for each in two.statistics().replicas]
    assert pids == workers[0]
    assert two.experimental_local_results(keys) == (0, 10)
    assert two.experimental_local_results(sums) == (0, 2)


def test_everybody_gets_a_result_that_is_not_distributed(two: cs.CentralStorageStrategy) -> None:
    assert two.run(lambda: context().merge_call(lambda strategy: "one")) == "one"


def test_an_array_that_all_got_alike_is_one_where_none_has_touched_it(two: cs.CentralStorageStrategy) -> None:
    large = np.arange(1000.0)

    def step(touch: bool) -> Any:
        result = context().merge_call(lambda strategy: {"large": large, "number": 0.5, "list": [np.float32(3)]})
        again = context().merge_call(lambda strategy, x: isinstance(x, np.ndarray), args=(result["large"],))
        if touch and replica() == 1:
            result["large"][0] = 7
        return {**result, "again": again, "key": {result["number"]: result["large"].copy()}}

    found = two.run(step, args=(False,))
    np.testing.assert_array_equal(found["large"], large)
    assert (found["number"], found["list"], found["again"]) == (0.5, [3], True)
    assert isinstance(found["key"][0.5], cs.PerReplica)  # a copy is each replica's own
    touched = two.run(step, args=(True,))
    assert [array[0] for array in touched["large"].values] == [0, 7]
    assert touched["number"] == 0.5


def test_reducing_writing_and_reading_in_a_merge(two: cs.CentralStorageStrategy, total: cs.Variable) -> None:
    def merge(strategy: Any, value: Any) -> float:
        total.assign_add(strategy.reduce("SUM", value, axis=None))
        return float(total.numpy()[0])

    def step() -> Any:
        total.assign_add(np.ones(2))
        seen = context().merge_call(merge, args=(np.full(2, 10.0 * (1 + replica())),))
        total.assign_add(np.ones(2))
        return seen

    assert two.run(step) == 32.0
    np.testing.assert_array_equal(total.numpy(), [34, 34])


def test_a_run_inside_a_merge(two: cs.CentralStorageStrategy, total: cs.Variable) -> None:
    def inner(value: float) -> int:
        total.assign_add(np.full(2, value))
        return os.getpid()

    def merge(strategy: Any) -> Any:
        first = strategy.run(inner, args=(1.0,))
        assert total.numpy()[0] == 2
        strategy.run(inner, args=(10.0,))
        return first

    pids = two.run(lambda: context().merge_call(merge))
    assert two.experimental_local_results(pids) == tuple(each.pid for each in two.statistics().replicas)
    np.testing.assert_array_equal(total.numpy(), [22, 22])


def test_a_run_inside_a_merge_inside_a_run_inside_a_merge(two: cs.CentralStorageStrategy) -> None:
    def innermost() -> int:
        return 100 + replica()

    def inner() -> Any:
        return context().merge_call(lambda strategy: strategy.run(innermost))

    values = two.run(lambda: context().merge_call(lambda strategy: strategy.run(inner)))
    assert two.experimental_local_results(values) == (100, 101)


def test_captured_state_is_replica_0s(two: cs.CentralStorageStrategy) -> None:
    def step() -> Any:
        mine = f"of replica {replica()}"
        return context().merge_call(lambda strategy: mine)

    assert two.run(step) == "of replica 0"


def test_an_exception_in_a_merge_ends_the_run(two: cs.CentralStorageStrategy, total: cs.Variable) -> None:
    def merge(strategy: Any) -> None:
        total.assign(np.full(2, 5.0))
        raise LookupError("in the merge")

    with pytest.raises(LookupError, match="in the merge"):
        two.run(lambda: context().merge_call(merge))
    np.testing.assert_array_equal(total.numpy(), [5, 5])
    assert two.run(lambda: context().merge_call(lambda strategy: "fine")) == "fine"


def test_an_exception_in_a_nested_run_can_be_caught_in_the_merge(two: cs.CentralStorageStrategy) -> None:
    def fails() -> None:
        raise LookupError("nested")

    def merge(strategy: Any) -> str:
        try:
            strategy.run(fails)
        except LookupError as error:
            return f"caught {error}"
        return "not raised"

    assert "nested" in two.run(lambda: context().merge_call(merge))


def test_a_merge_that_only_one_replica_calls(two: cs.CentralStorageStrategy) -> None:
    def step() -> None:
        if replica() == 1:
            context().merge_call(lambda strategy: None)

    with pytest.raises(errors.MergeMismatchError, match="merge_call"):
        two.run(step)
    assert two.experimental_local_results(two.run(replica)) == (0, 1)
