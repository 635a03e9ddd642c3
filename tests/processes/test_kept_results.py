"""Results whose type does not depend on the data, what reduce says where it does, and the warning of ON_READ."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs
from cs_proto.errors import InvalidArgumentError

KEEP = cs.RunOptions(keep_per_replica=True)


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        yield connected(strategy)


def test_equal_counts_come_back_bare_unless_kept(two: cs.CentralStorageStrategy) -> None:
    data = two.experimental_distribute_dataset(cs.data.Dataset.range(103).batch(10))
    counts = {
        options: sum(sum(two.experimental_local_results(two.run(len, (batch,), options=options))) for batch in data)
        for options in (None, cs.RunOptions(), KEEP)
    }
    assert counts == {None: 53, cs.RunOptions(): 53, KEEP: 103}
    kept = [two.reduce("SUM", count, axis=None) for count in two.run_steps(len, data, options=KEEP)]
    assert sum(kept) == 103
    assert list(two.run_steps(len, data, 2)) == [5, 5]


def test_nothing_collapses(two: cs.CentralStorageStrategy) -> None:
    found = two.run(lambda: {"none": None, "int": 5, "text": ("a", True), "float": 1.0}, options=KEEP)
    assert {name: getattr(value, "values", None) for name, value in found.items()} == {
        "none": (None, None),
        "int": (5, 5),
        "text": None,
        "float": (1.0, 1.0),
    }
    assert [part.values for part in found["text"]] == [("a", "a"), (True, True)]

    def common() -> object:
        return cs.get_replica_context().merge_call(lambda strategy: np.ones(2))

    assert isinstance(two.run(common, options=KEEP), cs.PerReplica)
    assert isinstance(two.run(lambda: 2.0), cs.PerReplica)  # equal floats are kept apart anyway


def test_one_replica_is_kept_too() -> None:
    default = cs.get_strategy()
    assert default.run(lambda: 3, options=KEEP).values == (3,)
    assert default.experimental_local_results(default.run(lambda: 3, options=KEEP)) == (3,)
    assert default.reduce("SUM", default.run(lambda: 3, options=KEEP), axis=None) == 3


def test_options_of_another_type_are_refused(two: cs.CentralStorageStrategy) -> None:
    data = two.experimental_distribute_dataset(cs.data.Dataset.range(4).batch(2))
    with pytest.raises(TypeError, match=r"cs\.RunOptions"):
        two.run_steps(len, data, options={"keep_per_replica": True})


def test_reduce_names_the_cure(two: cs.CentralStorageStrategy) -> None:
    with pytest.raises(InvalidArgumentError, match=r"options=cs\.RunOptions\(keep_per_replica=True\)"):
        two.reduce("SUM", two.run(lambda: 5), axis=None)
    with pytest.raises(InvalidArgumentError, match=r"cs\.nest\.map_structure"):
        two.reduce("SUM", two.run(lambda: {"loss": 1.0}), axis=None)


def test_on_read_warns_under_several_replicas(two: cs.CentralStorageStrategy) -> None:
    on_read = cs.VariableSynchronization.ON_READ
    first = cs.VariableAggregation.ONLY_FIRST_REPLICA
    with two.scope(), pytest.warns(UserWarning, match="ON_READ has no effect here.*ONLY_FIRST_REPLICA.*assign_add"):
        cs.Variable(0.0, synchronization=on_read, aggregation=first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cs.Variable(0.0, synchronization=on_read)
        with two.scope():
            cs.Variable(0.0, synchronization=cs.VariableSynchronization.ON_WRITE)
