"""Variables: what may be written and read where, over stand-ins for the client's link and a worker's replica."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from central_storage.core import context
from central_storage.core.values import regroup
from central_storage.strategy.service_strategy import CentralStorageStrategy
from cs_proto.arrays import Location
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import Variable as Record
from cs_proto.messages import VariableSpec
from cs_proto.scatter import write

F32 = np.float32
AGGREGATIONS = list(cs.VariableAggregation)
NONE, SUM, MEAN, FIRST = AGGREGATIONS


class Store:
    """Both backends at once: the values of variables, and what was asked of it in a replica."""

    replica = 0
    ended = None
    device = "/job:localhost/replica:0/task:0/device:CPU:0"

    def __init__(self, replicas: int = 2) -> None:
        self.replicas = replicas
        self.values: dict[int, np.ndarray] = {}
        self.specs: dict[int, VariableSpec] = {}
        self.points: list[tuple[Any, ...]] = []
        self.forgotten: list[int] = []
        self.reads = 0
        self.answers: list[np.ndarray] = []

    def create(self, spec: VariableSpec, value: np.ndarray, site: str) -> Record:
        number = len(self.values) + 1
        self.values[number], self.specs[number] = np.array(value), spec
        return self.variable(number)

    def variable(self, number: int) -> Record:
        return Record(number, self.specs[number], Location("parameters/float32", 0), 0)

    def write(self, number: int, op: Any, value: np.ndarray, rows: np.ndarray | None, site: str) -> None:
        write(self.values[number], op, value, rows)
        self.points.append(("write", op, value.tolist()))

    def assign(self, number: int, op: Any, value: np.ndarray, site: str, *, scalar: bool) -> None:
        self.points.append(("assign", op, value.tolist(), scalar))

    def read(self, number: int) -> np.ndarray:
        self.reads += 1
        self.answers.append(self.values[number].copy())
        return self.answers[-1]

    def read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        copied: np.ndarray = self.values[number][rows]
        return copied

    def view(self, number: int) -> np.ndarray:
        view = self.values[number].view()
        view.flags.writeable = False
        return view

    def forget(self, kind: str, number: int) -> None:
        if kind != "handle":
            self.forgotten.append(number)

    def settle_names(self) -> None:
        """No name changes."""

    def array_module(self) -> Any:
        return np


def strategy(store: Store) -> CentralStorageStrategy:
    devices = [f"cpu:{n}" for n in range(store.replicas)]
    return CentralStorageStrategy.from_backend(store, devices, "cpu:0")  # type: ignore[arg-type]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def s(store: Store) -> CentralStorageStrategy:
    return strategy(store)


def made(s: CentralStorageStrategy, value: Any, **options: Any) -> cs.Variable:
    with s.scope():
        return cs.Variable(value, **options)


def rows(values: Any, indices: Any) -> cs.IndexedSlices:
    return cs.IndexedSlices(np.array(values, F32), np.array(indices))


# --- initial values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.5, None, "float32"),
        ([1, 2], None, "int32"),
        (1 << 40, None, "int64"),
        (True, None, "bool"),
        (1j, None, "complex128"),
        (np.zeros(2), None, "float64"),
        (np.float16(1), None, "float16"),
        (lambda: [1.0, 2.0], None, "float32"),
        ([1, 2], "float64", "float64"),
        (np.zeros(2), np.float32, "float32"),
        (np.arange(3), np.float32, "float32"),
        (np.arange(3), np.int8, "int8"),
    ],
)
def test_dtypes_of_initial_values(s: CentralStorageStrategy, value: Any, dtype: Any, expected: str) -> None:
    for v in (made(s, value, dtype=dtype), cs.Variable(value, dtype=dtype)):
        assert v.dtype == expected
        assert v.numpy().dtype == expected


@pytest.mark.filterwarnings("ignore:synchronization=ON_READ has no effect:UserWarning")
def test_on_read_is_not_trainable_and_no_aggregation_is_none(s: CentralStorageStrategy) -> None:
    v = made(s, 1.0, synchronization=cs.VariableSynchronization.ON_READ, aggregation=None)
    assert (v.trainable, v.aggregation) == (False, cs.VariableAggregation.NONE)
    assert made(s, 1.0).trainable


def test_arguments_of_tensorflow_that_make_no_difference_are_accepted(s: CentralStorageStrategy) -> None:
    v = made(
        s,
        1.0,
        validate_shape=True,
        caching_device="/cpu:0",
        variable_def=None,
        import_scope="scope",
        experimental_enable_variable_lifting=False,
    )
    assert v.numpy() == 1.0


@pytest.mark.parametrize(
    ("value", "options", "kind", "pattern"),
    [
        (1.5, {"dtype": "int32"}, TypeError, "is not converted to int32"),
        (np.ones(2), {"dtype": "int32"}, TypeError, "is not converted to int32"),
        (300, {"dtype": "uint8"}, ValueError, "does not fit uint8"),
        ("text", {}, ValueError, "cannot have dtype"),
        (1.0, {"validate_shape": False}, ValueError, "validate_shape=False would let .* leave validate_shape out"),
        (1.0, {"variable_def": b""}, ValueError, "variable_def belongs to TensorFlow's graphs"),
        (None, {}, ValueError, "cannot become an array"),
        ([[1], [1, 2]], {}, ValueError, "cannot become an array"),
        ([1.0, 2.0], {"shape": (3,)}, ValueError, r"shape \(3,\) was asked for"),
        (cs.PerReplica([1, 2]), {}, ValueError, "one value, not one per replica"),
        (1.0, {"aggregation": 77}, TypeError, "must be a VariableAggregation"),
        (1.0, {"synchronization": "ON_READ"}, ValueError, "must be a VariableSynchronization"),
        (1.0, {"trainable": True, "synchronization": cs.VariableSynchronization.ON_READ}, ValueError, "not trainable"),
        (1.0, {"constraint": 3}, TypeError, "constraint must be a function"),
        (1.0, {"name": 3}, TypeError, "name must be a str"),
    ],
)
def test_what_no_variable_is_made_of(
    s: CentralStorageStrategy, value: Any, options: dict[str, Any], kind: type[Exception], pattern: str
) -> None:
    with pytest.raises(kind, match=pattern):
        made(s, value, **options)
    with pytest.raises(kind, match=pattern):
        cs.Variable(value, **options)


# --- outside replicas: applied once, whatever the aggregation -------------------------------------------------------


@pytest.mark.filterwarnings("ignore:synchronization=ON_READ has no effect:UserWarning")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("synchronization", list(cs.VariableSynchronization))
@pytest.mark.parametrize("in_scope", [True, False])
def test_writes_outside_replicas_count_once(
    s: CentralStorageStrategy, aggregation: Any, synchronization: Any, in_scope: bool
) -> None:
    options = {"aggregation": aggregation, "synchronization": synchronization}
    for v in (made(s, [1.0, 2.0], **options), cs.Variable([1.0, 2.0], **options)):
        assert (v.aggregation, v.synchronization) == (aggregation, synchronization)

        def everything(v: cs.Variable = v) -> None:
            assert v.assign([4, 5]) is v
            v.assign_add(np.array([1, 1], F32))
            assert v.assign_sub([0.5, 0.5], read_value=False) is None
            assert v.scatter_add(rows([1, 1], [0, 0])) is v
            v.scatter_sub(rows([2], [1]))
            v.scatter_update(rows([8, 9], [0, 0]))

        if in_scope:
            with s.scope():
                everything()
        else:
            everything()
        assert v.numpy().tolist() == [9, 3.5]


@pytest.mark.parametrize(
    ("write_it", "kind", "pattern"),
    [
        (lambda v: v.assign([1.0, 2.0]), ValueError, r"shape \(3,\), not \(2,\)"),
        (lambda v: v.assign_add(1.0), InvalidArgumentError, "there is no broadcasting"),
        (lambda v: v.assign(np.array([1, 2, 3])), ValueError, "has dtype float32, but the value has int64"),
        (lambda v: v.assign_sub(np.zeros(3)), ValueError, "dtype float32, but the value has float64"),
        (lambda v: v.assign(None), ValueError, "cannot become an array"),
        (lambda v: v.assign_add(cs.PerReplica([1.0, 2.0])), ValueError, "assign_add cannot take a PerReplica"),
        (lambda v: v.scatter_add(cs.PerReplica([1.0, 2.0])), ValueError, "scatter_add cannot take a PerReplica"),
        (lambda v: v.scatter_add(np.ones(3)), TypeError, "takes an IndexedSlices, not ndarray"),
        (lambda v: v.scatter_add(rows([1], [3])), InvalidArgumentError, r"row 3 is outside \[0, 3\)"),
        (lambda v: v.scatter_update(rows([1], [-1])), InvalidArgumentError, "row -1 is outside"),
        (lambda v: v.scatter_sub(rows([[1]], [0])), InvalidArgumentError, r"not \(1, 1\)"),
        (lambda v: v.scatter_sub(cs.IndexedSlices(np.ones(1), [0])), InvalidArgumentError, "float64"),
        (lambda v: v.__setitem__(0, 1.0), TypeError, "assign the whole value, or rows with scatter_update"),
        (lambda v: v.sparse_read([0.5]), InvalidArgumentError, "indices must be integers"),
        (lambda v: v.sparse_read(3, name="looked_up"), InvalidArgumentError, "sparse_read: row 3 is outside"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    s: CentralStorageStrategy, write_it: Callable[[cs.Variable], object], kind: type[Exception], pattern: str
) -> None:
    for v in (made(s, [1.0, 2.0, 3.0]), cs.Variable([1.0, 2.0, 3.0])):
        with pytest.raises(kind, match=pattern):
            write_it(v)
        assert v.numpy().tolist() == [1, 2, 3]


def test_a_sparse_variable_is_trainable_and_says_so(s: CentralStorageStrategy) -> None:
    for v in (made(s, [[1.0], [2.0]], sparse=True), cs.Variable([[1.0], [2.0]], sparse=True)):
        assert (v.sparse, v.trainable, copy.deepcopy(v).sparse) == (True, True, True)
    assert made(s, [1.0]).sparse is False


@pytest.mark.parametrize(
    ("value", "options", "pattern"),
    [
        ([1.0], {"trainable": False}, "variable table: sparse=True is for a table that is trained; leave out"),
        (1.0, {}, r"table of rows with a floating-point or complex dtype, but the value is float32\[\]"),
        ([1, 2], {}, r"the value is int32\[2\]; leave out sparse=True"),
        ([1.0], {"constraint": abs}, "variable table: a constraint needs dense gradients"),
    ],
)
def test_what_cannot_be_trained_by_rows_is_not_sparse(
    s: CentralStorageStrategy, value: Any, options: dict[str, Any], pattern: str
) -> None:
    for make in (lambda **given: made(s, value, **given), lambda **given: cs.Variable(value, **given)):
        with pytest.raises(InvalidArgumentError, match=pattern):
            make(name="table", sparse=True, **options)


def test_integers_take_no_fractions_and_nothing_they_cannot_hold(s: CentralStorageStrategy) -> None:
    v = made(s, 1, dtype="uint8")
    with pytest.raises(TypeError, match="is not converted to uint8"):
        v.assign(1.5)
    with pytest.raises(ValueError, match="does not fit uint8"):
        v.assign_add(256)
    with pytest.raises(InvalidArgumentError, match="no axes and therefore no rows"):
        v.scatter_add(cs.IndexedSlices(np.ones(1, np.uint8), [0]))
    b = made(s, [True])
    with pytest.raises(InvalidArgumentError, match="bool cannot be added"):
        b.assign_add([True])


def test_rows(s: CentralStorageStrategy) -> None:
    for v in (made(s, np.arange(6, dtype=F32).reshape(3, 2)), cs.Variable(np.arange(6, dtype=F32).reshape(3, 2))):
        assert v.sparse_read([[2, 0]]).tolist() == [[[4, 5], [0, 1]]]
        assert v.sparse_read(1).tolist() == [2, 3]
        assert v.sparse_read([]).shape == (0, 2)
        assert v.sparse_read(np.array([1], np.uint8)).tolist() == [[2, 3]]


def test_another_strategy_may_read_and_not_write(s: CentralStorageStrategy) -> None:
    v, other = made(s, [1.0], aggregation=SUM), strategy(Store())
    with other.scope():
        assert (v + 0.0).tolist() == [1]
        for wrong in (lambda: v.assign([2.0]), lambda: v.scatter_add(rows([1], [0]))):
            with pytest.raises(RuntimeError, match="inside the scope of another"):
                wrong()
    w = cs.Variable([1.0])  # what is nobody's may be written anywhere
    with other.scope():
        assert w.assign([2.0]).numpy().tolist() == [2]
    assert other.adopt(v) == ("foreign", 0)  # it goes as its value
    make, parts = v._cs_parts()
    there = make(*parts)
    v.assign([5.0])
    assert (there + 1).tolist() == [2]
    assert there.sparse_read([0]).tolist() == [1]
    for refused in (lambda: there.assign([2.0]), lambda: there.scatter_add(rows([1], [0]))):
        with pytest.raises(ContextError, match="may only read it"):
            refused()
    assert other.adopt(there) == ("foreign", 0)


# --- in a replica ---------------------------------------------------------------------------------------------------


def test_assigns_in_one_of_several_replicas(s: CentralStorageStrategy, store: Store) -> None:
    none, total, mean = made(s, 1.0), made(s, [1.0], aggregation=SUM), made(s, 1.0, aggregation=MEAN)
    with context.enter_replica(s, store):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="its aggregation is NONE"):
            none.assign_add(F32(1))
        with pytest.raises(ValueError, match="SUM, which adds up arrays"):
            total.assign_add([5.0])
        with pytest.raises(ValueError, match="cannot take a PerReplica"):
            total.assign_add(cs.PerReplica([1.0, 2.0]))
        assert total.assign_add(np.array([5], F32)) is total
        assert mean.assign(2.0, read_value=False) is None
        none.assign
        total.scatter_add(rows([7], [0]))
    assert store.points == [
        ("assign", "assign_add", [5.0], False),
        ("assign", "assign", 2.0, True),
        ("write", "scatter_add", [7.0]),
    ]


def test_with_one_replica_no_rule_of_aggregation_applies() -> None:
    store = Store(1)
    s = strategy(store)
    variables = [made(s, [1.0], aggregation=aggregation) for aggregation in AGGREGATIONS]
    with context.enter_replica(s, store):  # type: ignore[arg-type]
        for v in variables:
            v.assign_add([3.0])
    assert [point[:2] for point in store.points] == [("assign", "assign_add")] * 4


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_variable_from_outside_every_scope_is_written_without_agreement(
    s: CentralStorageStrategy, store: Store, aggregation: Any
) -> None:
    v = cs.Variable([1.0], aggregation=aggregation)
    s.adopt(v)
    with context.enter_replica(s, store):  # type: ignore[arg-type]
        v.assign_add([3.0])
        v.assign(np.array([9], F32))
    assert store.points == [("write", "assign_add", [3.0]), ("write", "assign", [9.0])]


def test_reading_in_a_replica_is_a_view_or_a_copy(s: CentralStorageStrategy, store: Store) -> None:
    v = made(s, [1.0, 2.0])
    with context.enter_replica(s, store):  # type: ignore[arg-type]
        view, value = np.asarray(v), v.value()
        assert not view.flags.writeable
        assert np.shares_memory(view, store.values[1])
        for own in (value, v.read_value(), v.numpy()):
            own[0] = 5
            assert not np.shares_memory(own, store.values[1])
    assert store.reads == 0


def test_a_kept_view_is_shown_in_its_context_and_epoch_alone(s: CentralStorageStrategy, store: Store) -> None:
    v, asked = made(s, [1.0]), []

    class Backend(Store):
        def view(self, number: int) -> np.ndarray:
            asked.append(number)
            context.reading.epoch = store
            return store.view(number)

    def is_asked_for() -> bool:
        before = len(asked)
        assert np.asarray(v) is not None
        return len(asked) > before

    backend: Any = Backend()
    with context.enter_replica(s, backend):
        assert [is_asked_for(), is_asked_for()] == [True, False]
        assert context.in_cross_replica(s, lambda: np.asarray(v)).flags.writeable
        assert [is_asked_for(), is_asked_for()] == [True, False]
        with context.enter_replica(s, backend):
            assert [is_asked_for(), is_asked_for()] == [True, False]
        assert [is_asked_for(), is_asked_for()] == [True, False]
    assert np.asarray(v).flags.writeable
    with s.scope():
        assert np.asarray(v).flags.writeable
    with context.enter_replica(s, backend):
        context.reading.epoch = v  # of another backend
        assert is_asked_for()
    assert not is_asked_for()


# --- outside every scope --------------------------------------------------------------------------------------------


def test_a_local_variable_moves_to_the_first_strategy_that_takes_it_along(s: CentralStorageStrategy) -> None:
    initial = np.array([1.0], F32)
    v = cs.Variable(initial, name="w", trainable=False)
    initial[0] = 7
    v.assign_add([1.0])
    assert (v.strategy, v.number, v.version, v.name, v.trainable) == (None, 0, 1, "w", False)
    assert v.device.endswith("CPU:0")
    assert s.adopt(v) == ("variable", 1)
    assert s.adopt(v) == ("variable", 1)
    assert (v.strategy, v.number) == (s, 1)
    assert v.numpy().tolist() == [2]
    assert s.object_for("variable", 1) is v
    assert strategy(Store()).adopt(v) == ("foreign", 0)
    assert v.strategy is s


def test_two_local_variables_are_two(s: CentralStorageStrategy) -> None:
    v, w = cs.Variable(1.0), cs.Variable(1.0)
    assert regroup([v, v]) is v
    assert isinstance(regroup([v, w]), cs.PerReplica)


def test_the_default_strategy_runs_on_local_variables() -> None:
    v = cs.Variable(1.0)
    assert cs.get_strategy().run(lambda: v.assign_add(2.0)) is v
    assert float(v) == 3


def test_what_nobody_holds_is_forgotten_but_what_a_replica_made(s: CentralStorageStrategy, store: Store) -> None:
    held = [made(s, 1.0), cs.Variable(1.0), cs.Variable(1.0)]
    s.adopt(held[1])
    with context.enter_replica(s, store):  # type: ignore[arg-type]
        held.append(cs.Variable(1.0))
    assert [v.number for v in held] == [1, 2, 0, 3]
    assert store.forgotten == []
    held.clear()
    gc.collect()
    assert sorted(store.forgotten) == [1, 2]


# --- as an array ----------------------------------------------------------------------------------------------------


def test_arithmetic_is_that_of_the_value(s: CentralStorageStrategy) -> None:
    value = np.array([[1.0, 2.0], [3.0, 4.0]], F32)
    for v in (made(s, value), cs.Variable(value)):
        for got, expected in [
            (v + 1.0, value + 1),
            (np.add(v, [1.0, 2.0]), value + F32([1, 2])),
            (np.multiply([1, 2], v), value * F32([1, 2])),
            (2 - v, 2 - value),
            (v @ v, value @ value),
            (value @ v, value @ value),
            (-v, -value),
            (abs(v), value),
            (v**2, value**2),
            (v > 2, value > 2),
            (v == v, value == value),
            (np.sum(v, axis=0), value.sum(axis=0)),
            (np.mean(v), value.mean()),
            (np.exp(v), np.exp(value)),
            (np.concatenate([v, v]), np.concatenate([value, value])),
            (v[0, 1:], value[0, 1:]),
            (v.T, value.T),
            (np.stack(list(v)), value),
            (np.from_dlpack(v), value),
        ]:
            np.testing.assert_array_equal(got, expected)
            assert np.asarray(got).dtype == np.asarray(expected).dtype
        assert (v.shape, v.ndim, v.size, len(v)) == ((2, 2), 2, 4, 2)
        with pytest.raises(RuntimeError, match=r"use variable\.assign_add"):
            v += 1.0
        with pytest.raises(RuntimeError, match=r"use variable\.assign_add"):
            np.add(v, 1.0, out=v)
        with pytest.raises(RuntimeError, match="for rows scatter_add"):
            np.add.at(v, 0, 1.0)
        with pytest.raises(TypeError):
            v + cs.PerReplica([1, 2])
        assert not hasattr(v, "__cuda_array_interface__")


class Unversioned:
    """What a consumer sees that knows of no read-only memory, as JAX does: ``__dlpack__`` is asked for no version."""

    def __init__(self, producer: Any) -> None:
        self.producer = producer

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.producer.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> Any:
        return self.producer.__dlpack_device__()


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_dlpack_reads_the_value_once_and_its_device_not_at_all(s: CentralStorageStrategy, store: Store) -> None:
    v = made(s, np.arange(5, dtype=F32))
    assert v.__dlpack_device__() == (1, 0)
    assert store.reads == 0
    for consumed in (np.from_dlpack(v), np.from_dlpack(Unversioned(v)), np.from_dlpack(v, copy=True)):
        assert any(np.shares_memory(consumed, read) for read in store.answers)
        assert consumed.tolist() == [0, 1, 2, 3, 4]
    assert store.reads == 3


@pytest.mark.parametrize("options", [{}, {"max_version": None}, {"max_version": (0, 8)}, {"copy": True}], ids=str)
def test_dlpack_in_a_replica_copies_to_a_multiple_of_64_bytes(
    s: CentralStorageStrategy, store: Store, options: dict[str, Any]
) -> None:
    v = made(s, np.arange(5, dtype=F32))
    with context.enter_replica(s, store):  # type: ignore[arg-type]
        consumed = np.from_dlpack(Once(v.__dlpack__(**options)))
        ctypes.memset(address(consumed), 9, 4)  # NumPy takes every array without a version for read-only; JAX does not
        assert address(consumed) % 64 == 0
        assert v.numpy().tolist() == [0, 1, 2, 3, 4]
        assert address(np.from_dlpack(Unversioned(v))) % 64 == 0


class Once:
    """A capsule as a producer."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return 1, 0


def test_dlpack_in_a_replica_is_the_view_where_the_consumer_knows_of_read_only_memory(
    s: CentralStorageStrategy, store: Store
) -> None:
    v = made(s, np.arange(5, dtype=F32))
    with context.enter_replica(s, store):  # type: ignore[arg-type]
        for copy_it in (None, False):
            view = np.from_dlpack(v, copy=copy_it)
            assert address(view) == address(store.values[1])
            assert not view.flags.writeable


def test_dlpack_refuses_what_would_need_a_copy_or_another_device(s: CentralStorageStrategy, store: Store) -> None:
    v, local = made(s, np.zeros(5, F32)), cs.Variable([1.0])
    for variable in (v, local):
        with pytest.raises(BufferError, match=r"copy=False.*variable 'Variable'.*leave copy out"):
            np.from_dlpack(variable, copy=False)
        with pytest.raises(BufferError, match="device"):
            variable.__dlpack__(dl_device=(2, 0))
        assert variable.__dlpack_device__() == (1, 0)
        assert np.from_dlpack(Once(variable.__dlpack__(dl_device=(1, 0)))).size == variable.size
    with context.enter_replica(s, store):  # type: ignore[arg-type]
        with pytest.raises(BufferError, match=r"copy=False.*max_version"):
            v.__dlpack__(copy=False)
        with pytest.raises(BufferError, match="device"):
            v.__dlpack__(dl_device=(2, 0), max_version=(1, 0))


def test_dlpack_of_a_local_variable_is_an_aligned_copy() -> None:
    v = cs.Variable(np.arange(5, dtype=F32))
    for producer in (v, Unversioned(v)):
        consumed = np.from_dlpack(producer)
        assert address(consumed) % 64 == 0
        ctypes.memset(address(consumed), 9, 4)
        assert v.numpy().tolist() == [0, 1, 2, 3, 4]


def test_scalars_are_numbers(s: CentralStorageStrategy) -> None:
    v = made(s, 3)
    assert (int(v), float(v), bool(v), [10, 20, 30, 40][v]) == (3, 3.0, True, 40)
    assert v.dtype == np.int32
    assert v + 1 == 4
    with pytest.raises(TypeError, match="without axes"):
        len(v)


def test_asking_for_a_gpu_reads_nothing(s: CentralStorageStrategy, store: Store) -> None:
    v = made(s, [1.0])
    store.reads = 0
    assert not hasattr(v, "__cuda_array_interface__")
    assert store.reads == 0


# --- copies and pickles ---------------------------------------------------------------------------------------------


def test_a_deep_copy_is_a_new_variable_with_the_value_of_now(s: CentralStorageStrategy) -> None:
    for v in (made(s, [1.0], aggregation=MEAN, constraint=np.abs), cs.Variable([1.0], aggregation=MEAN)):
        v.assign([2.0])
        nest = {"a": v, "b": [v]}
        copied = copy.deepcopy(nest)
        w = copied["a"]
        assert copied["b"][0] is w
        assert w is not v
        assert isinstance(w, cs.Variable)
        v.assign([3.0])
        assert w.numpy().tolist() == [2]
        assert (w.strategy, w.aggregation, w.dtype, w.constraint) == (v.strategy, MEAN, v.dtype, v.constraint)


def test_no_other_pickler_takes_one_along(s: CentralStorageStrategy) -> None:
    for v in (made(s, [1.0]), cs.Variable([1.0])):
        with pytest.raises(TypeError, match=r"this Variable refers to state .* pickle values instead, e.g. v.numpy"):
            pickle.dumps(v)
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copy.copy(v)


def test_variables_are_leaves_of_nests(s: CentralStorageStrategy) -> None:
    v = made(s, [1.0])
    assert s.experimental_local_results(v) == (v,)
    assert cs.nest.flatten({"a": [v]}) == [v]
