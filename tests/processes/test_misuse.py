"""What is used wrongly raises the exception that the TensorFlow class raises, names the thing and says what to do.

One row for each misuse; after every one the same strategies go on to work.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.harness.replicas import replica
from tests.harness.services import connected

import central_storage as cs
from central_storage.errors import InvalidArgumentError, MergeMismatchError, OutOfRangeError


class World(NamedTuple):
    """Two strategies of two replicas, and variables of the first."""

    s: cs.CentralStorageStrategy
    other: cs.CentralStorageStrategy
    v: cs.Variable
    summed: cs.Variable
    optimizer: cs.optimizers.Optimizer


@pytest.fixture(scope="module")
def world(two: cs.CentralStorageStrategy) -> Iterator[World]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as other:
        with two.scope():
            v = cs.Variable(np.zeros(3, np.float32), name="plain")
            summed = cs.Variable(0.0, name="summed", aggregation=cs.VariableAggregation.SUM)
            optimizer = cs.optimizers.SGD(0.1)
        yield World(two, connected(other), v, summed, optimizer)


def per_replica(s: cs.CentralStorageStrategy, *values: Any) -> Any:
    return s.experimental_distribute_values_from_function(
        lambda context: cs.convert_to_tensor(values[context.replica_id_in_sync_group])
    )


def in_replica(body: Callable[[World], Any]) -> Callable[[World], Any]:
    """``body`` inside a replica of the first strategy."""

    def misuse(w: World) -> Any:
        s, v, summed, optimizer = w.s, w.v, w.summed, w.optimizer  # the other strategy cannot be sent
        return s.run(lambda: body(World(s, s, v, summed, optimizer)))

    return misuse


def in_other_scope(body: Callable[[World], Any]) -> Callable[[World], Any]:
    def misuse(w: World) -> Any:
        with w.other.scope():
            return body(w)

    return misuse


def enter_scope(w: World) -> None:
    with w.s.scope():
        pass


def set_strategy_in_scope(w: World) -> None:
    with w.s.scope():
        cs.experimental_set_strategy(w.s)


def apply_in_scope(w: World) -> None:
    with w.s.scope():
        w.optimizer.apply_gradients([(np.ones(3, np.float32), w.v)])


def average_loss_in_scope(w: World) -> None:
    with w.s.scope():
        cs.nn.compute_average_loss(np.ones(3, np.float32))


def regularization_loss_in_scope(w: World) -> None:
    with w.s.scope():
        cs.nn.scale_regularization_loss(np.float32(1))


def unequal_merge_points(w: World) -> Any:
    if replica() == 0:
        return cs.get_replica_context().all_reduce("SUM", np.ones(2))  # type: ignore[union-attr]
    return None


def unequal_creation(w: World) -> None:
    cs.Variable(1.0, name="first")
    if replica() == 1:
        cs.Variable(2.0, name="second")


def all_reduce_shapes(w: World) -> Any:
    return cs.get_replica_context().all_reduce("SUM", np.ones(2 + replica()))  # type: ignore[union-attr]


def colocate_with_foreign(w: World) -> None:
    with w.other.scope(), w.other.extended.colocate_vars_with(w.v):
        pass


def colocate_outside_scope(w: World) -> None:
    with w.s.extended.colocate_vars_with(w.v):
        pass


def exhausted(w: World) -> Any:
    iterator = iter(w.s.experimental_distribute_dataset([np.zeros(2)]))
    iterator.get_next()
    return iterator.get_next()


def exhausted_next(w: World) -> Any:
    iterator = iter(w.s.experimental_distribute_dataset([np.zeros(2)]))
    next(iterator)
    return next(iterator)


def raising_value_fn(context: object) -> Any:
    raise KeyError("value_fn")


def raising_dataset_fn(context: object) -> Any:
    raise KeyError("dataset_fn")


def merge_call_that_raises(w: World) -> Any:
    def merge_fn(strategy: object) -> None:
        raise KeyError("merge_fn")

    return cs.get_replica_context().merge_call(merge_fn)  # type: ignore[union-attr]


def structures(w: World) -> Any:
    return (np.ones(1), np.ones(1)) if replica() == 0 else np.ones(1)


_F3 = np.ones(3, np.float32)
_SLICES = cs.IndexedSlices(np.ones((1, 3), np.float32), np.array([0]), (3, 3))

#: What is done, the exception, and words of its message.
MISUSES: dict[str, tuple[Callable[[World], Any], type[BaseException], str]] = {
    "run in a replica": (in_replica(lambda w: w.s.run(lambda: 1)), RuntimeError, "merge_call"),
    "reduce in a replica": (in_replica(lambda w: w.s.reduce("SUM", _F3, None)), RuntimeError, "merge_call"),
    "gather in a replica": (in_replica(lambda w: w.s.gather(_F3, 0)), RuntimeError, "merge_call"),
    "reduce_to in a replica": (
        in_replica(lambda w: w.s.extended.reduce_to("SUM", _F3, "cpu:0")),
        RuntimeError,
        "merge_call",
    ),
    "scope in a replica": (in_replica(enter_scope), RuntimeError, "replica"),
    "run in another scope": (in_other_scope(lambda w: w.s.run(lambda: 1)), RuntimeError, "scope of another"),
    "reduce in another scope": (
        in_other_scope(lambda w: w.s.reduce("SUM", per_replica(w.s, 1.0, 2.0), None)),
        RuntimeError,
        "scope of another",
    ),
    "gather in another scope": (in_other_scope(lambda w: w.s.gather(_F3, 0)), RuntimeError, "scope of another"),
    "reduce_to in another scope": (
        in_other_scope(lambda w: w.s.extended.reduce_to("MEAN", _F3, "cpu:0")),
        RuntimeError,
        "scope of another",
    ),
    "scope in another scope": (in_other_scope(enter_scope), RuntimeError, "another"),
    "assign in another scope": (in_other_scope(lambda w: w.v.assign(_F3)), RuntimeError, "plain"),
    "unequal merge points": (in_replica(unequal_merge_points), MergeMismatchError, "replica 1 returned"),
    "set_strategy in a scope": (set_strategy_in_scope, RuntimeError, "scope"),
    "copy a strategy": (lambda w: copy.copy(w.s), RuntimeError, "copied"),
    "pickle a strategy": (lambda w: pickle.dumps(w.s), TypeError, "state in its service"),
    "pickle a variable": (lambda w: pickle.dumps(w.v), TypeError, "numpy()"),
    "colocate outside a scope": (colocate_outside_scope, RuntimeError, "scope"),
    "apply in the cross-replica context": (apply_in_scope, RuntimeError, "replica function"),
    "average loss in the cross-replica context": (average_loss_in_scope, RuntimeError, "replica"),
    "regularization loss in the cross-replica context": (regularization_loss_in_scope, RuntimeError, "replica"),
    "more variables on a later replica": (in_replica(unequal_creation), RuntimeError, "second"),
    "args not a list or tuple": (lambda w: w.s.run(lambda x: x, args=5), ValueError, "args"),
    "kwargs not a mapping": (lambda w: w.s.run(lambda x: x, kwargs=5), TypeError, "kwargs"),
    "batch size not divisible": (
        lambda w: w.s.distribute_datasets_from_function(lambda context: context.get_per_replica_batch_size(5)),
        ValueError,
        "5",
    ),
    "unknown op": (lambda w: w.s.reduce("MAX", per_replica(w.s, 1.0, 2.0), None), ValueError, "MAX"),
    "SUM of a plain value": (lambda w: w.s.reduce("SUM", _F3, None), ValueError, "one value per replica"),
    "SUM of a nest": (lambda w: w.s.reduce("SUM", {"a": per_replica(w.s, 1.0, 2.0)}, None), ValueError, "dict"),
    "assign with aggregation NONE in a replica": (in_replica(lambda w: w.v.assign(_F3)), ValueError, "aggregation"),
    "SUM of one Python number": (
        in_replica(lambda w: w.summed.assign_add(5.0)),
        ValueError,
        "same Python number",
    ),
    "update of no variable": (lambda w: w.s.extended.update(5, lambda v: v), ValueError, "variable"),
    "colocate with a foreign variable": (colocate_with_foreign, ValueError, "plain"),
    "no gradients": (in_replica(lambda w: w.optimizer.apply_gradients([(None, w.v)])), ValueError, "None"),
    "PerReplica as an array": (lambda w: np.asarray(per_replica(w.s, 1.0, 2.0)), ValueError, "reduce"),
    "PerReplica in arithmetic": (lambda w: per_replica(w.s, 1.0, 2.0) + 1, TypeError, "PerReplica"),
    "PerReplica assigned across replicas": (lambda w: w.v.assign(per_replica(w.s, _F3, _F3)), ValueError, "PerReplica"),
    "dtype of an assign": (lambda w: w.v.assign(np.ones(3, np.int32)), ValueError, "astype"),
    "shape of an assign": (lambda w: w.v.assign(np.ones(4, np.float32)), ValueError, "plain"),
    "axis out of range": (lambda w: w.s.reduce("SUM", per_replica(w.s, _F3, _F3), 3), ValueError, "axis"),
    "shapes of components": (
        lambda w: w.s.reduce("SUM", per_replica(w.s, _F3, np.ones(2, np.float32)), None),
        InvalidArgumentError,
        "shape",
    ),
    "dtypes of components": (
        lambda w: w.s.reduce("SUM", per_replica(w.s, _F3, np.ones(3, np.int32)), None),
        InvalidArgumentError,
        "int32",
    ),
    "ranks of components": (
        lambda w: w.s.gather(per_replica(w.s, _F3, np.ones((3, 1), np.float32)), 0),
        InvalidArgumentError,
        r"float32\[3, 1\]",
    ),
    "shapes in all_reduce": (in_replica(all_reduce_shapes), InvalidArgumentError, "shape"),
    "gather axis": (lambda w: w.s.gather(per_replica(w.s, _F3, _F3), 1), InvalidArgumentError, "axis"),
    "shape of assign_add": (lambda w: w.v.assign_add(np.ones(4, np.float32)), InvalidArgumentError, "plain"),
    "op of a wrong type with an axis": (lambda w: w.s.reduce(5, per_replica(w.s, _F3, _F3), 0), TypeError, "5"),
    "axis of a wrong type": (lambda w: w.s.reduce("SUM", per_replica(w.s, _F3, _F3), "0"), TypeError, "axis"),
    "axis missing": (lambda w: w.s.reduce("SUM", per_replica(w.s, _F3, _F3)), TypeError, "axis"),
    "axis a list": (lambda w: w.s.reduce("SUM", per_replica(w.s, _F3, _F3), [0]), TypeError, "axis"),
    "op of a wrong type without an axis": (
        lambda w: w.s.reduce(5, per_replica(w.s, _F3, _F3), None),
        AssertionError,
        "5",
    ),
    "structures differ": (in_replica(structures), AssertionError, "replica 1"),
    "a list of destinations": (
        lambda w: w.s.extended.reduce_to("SUM", per_replica(w.s, _F3, _F3), ["cpu:0"]),
        AssertionError,
        "destination",
    ),
    "gather of sparse slices": (lambda w: w.s.gather(_SLICES, 0), NotImplementedError, "IndexedSlices"),
    "all_gather of sparse slices": (
        in_replica(lambda w: cs.get_replica_context().all_gather(_SLICES, 0)),  # type: ignore[union-attr]
        NotImplementedError,
        "IndexedSlices",
    ),
    "gradients not aggregated": (
        in_replica(lambda w: w.optimizer.apply_gradients([(_F3, w.v)], experimental_aggregate_gradients=False)),
        NotImplementedError,
        "summed",
    ),
    "iterator exhausted, get_next": (exhausted, OutOfRangeError, "ended"),
    "iterator exhausted, next": (exhausted_next, StopIteration, "ended"),
    "a tuple of arrays as a data set": (
        lambda w: w.s.experimental_distribute_dataset((np.ones(4), np.ones(4))),
        TypeError,
        "from_tensor_slices",
    ),
    "breakpoint in another process": (in_replica(lambda w: breakpoint()), RuntimeError, "in_process=True"),
    "exception in fn": (in_replica(lambda w: {}["fn"]), KeyError, "fn"),
    "exception in merge_fn": (in_replica(merge_call_that_raises), KeyError, "merge_fn"),
    "exception in value_fn": (
        lambda w: w.s.experimental_distribute_values_from_function(raising_value_fn),
        KeyError,
        "value_fn",
    ),
    "exception in dataset_fn": (
        lambda w: w.s.distribute_datasets_from_function(raising_dataset_fn),
        KeyError,
        "dataset_fn",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str, world: World) -> None:
    misuse, error, words = MISUSES[name]
    with pytest.raises(error, match=words) as raised:
        misuse(world)
    assert isinstance(raised.value, error)
    assert not cs.has_strategy()
    doubled = world.s.run(lambda: np.asarray(cs.get_replica_context().num_replicas_in_sync))  # type: ignore[union-attr]
    assert world.s.reduce("SUM", doubled, axis=None) == 4
    assert world.v.numpy().tolist() == [0.0] * 3


def test_a_context_kept_after_its_run(world: World) -> None:
    kept: list[Any] = []

    @cs.function  # keeps what it mutates
    def fn() -> None:
        kept.append(cs.get_replica_context())
        kept[0].all_reduce("SUM", np.ones(1))

    world.s.run(fn)
    with pytest.raises(RuntimeError, match="ended"):
        world.s.run(fn)
