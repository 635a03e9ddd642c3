"""The Strategy API over running replicas: what replicas see, what a merge function may do, replicas with several
devices. Once with processes, once with threads of the script."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import run
from tests.harness.replicas import context
from tests.harness.services import connected

import central_storage as cs

CPU = "/job:localhost/replica:0/task:0/device:CPU:"


def replica() -> Any:
    """The number of the replica as the array that it is."""
    return context().replica_id_in_sync_group


@pytest.fixture(scope="module", params=["processes", pytest.param("threads", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest) -> Iterator[cs.CentralStorageStrategy]:
    """Two replicas with two devices each."""
    devices = [("CPU:0", "CPU:1"), ("CPU:2", "CPU:3")]
    with cs.CentralStorageStrategy(devices, in_process=request.param == "threads") as strategy:
        yield connected(strategy, nested=True)


@pytest.fixture(scope="module", params=["processes", pytest.param("threads", marks=pytest.mark.slow)])
def alone(request: pytest.FixtureRequest) -> Iterator[cs.CentralStorageStrategy]:
    """One replica."""
    with cs.CentralStorageStrategy(["cpu:0"], in_process=request.param == "threads") as strategy:
        yield connected(strategy)


class TestReplica:
    def test_its_number_is_an_int32_array(self, pair: cs.CentralStorageStrategy) -> None:
        def step() -> Any:
            number = replica()
            assert isinstance(number, np.ndarray)
            assert (number.dtype, number.shape, number.flags.writeable) == (np.dtype(np.int32), (), False)
            assert "ab"[number] == ("a", "b")[int(number)]
            return number, context().num_replicas_in_sync, cs.get_strategy() is pair

        numbers, n, same = pair.run(step)
        assert [int(number) for number in pair.experimental_local_results(numbers)] == [0, 1]
        assert (n, same) == (2, True)

    def test_its_devices(self, pair: cs.CentralStorageStrategy) -> None:
        def step() -> Any:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found = context().devices
            return found, [str(warning.message) for warning in told]

        found, _ = pair.run(step)
        assert [pair.experimental_local_results(name) for name in found] == [
            (CPU + "0", CPU + "2"),
            (CPU + "1", CPU + "3"),
        ]
        assert pair.extended.worker_devices_by_replica == [[CPU + "0", CPU + "1"], [CPU + "2", CPU + "3"]]

    def test_what_belongs_outside(self, pair: cs.CentralStorageStrategy) -> None:
        with pair.scope():
            v = cs.Variable(1.0)
        value = np.ones(2)

        def step() -> None:
            for act in (
                lambda: pair.run(lambda: 1),
                lambda: pair.reduce("SUM", value, axis=0),
                lambda: pair.gather(value, axis=0),
                lambda: pair.scope().__enter__(),
                lambda: pair.extended.call_for_each_replica(lambda: 1),
                lambda: pair.extended.update(v, lambda x: x.assign(2.0)),
                lambda: pair.extended.update_non_slot(v, lambda: 1),
                lambda: pair.extended.reduce_to("SUM", value, v),
                lambda: pair.extended.batch_reduce_to("SUM", [(value, v)]),
                lambda: pair.extended.broadcast_to(value, v),
                lambda: pair.extended.experimental_make_numpy_dataset(value),
                lambda: pair.experimental_distribute_dataset(cs.data.Dataset.range(2).batch(2)),
                lambda: cs.experimental_set_strategy(pair),
            ):
                with pytest.raises(RuntimeError):
                    act()
            with pytest.raises(RuntimeError):
                copy.copy(pair)
            assert copy.deepcopy(pair) is pair
            assert pair.experimental_local_results(3) == (3,)
            assert pair.extended.read_var(v) == 1
            assert pair.extended.variable_created_in_scope(v)
            assert pair.extended.value_container(v) is v
            assert pair.cluster_resolver is None

        pair.run(step)
        assert v.numpy() == 1

    def test_a_context_is_used_where_it_is_current(self, pair: cs.CentralStorageStrategy) -> None:
        def step() -> Any:
            outer = context()

            def merge(strategy: Any) -> Any:
                with pytest.raises(RuntimeError, match="current"):
                    outer.all_reduce("SUM", np.ones(1))
                return "merged"

            return outer.merge_call(merge)

        assert pair.run(step) == "merged"


class TestCombining:
    def test_a_nest_of_arrays_and_rows(self, pair: cs.CentralStorageStrategy) -> None:
        def step(op: str) -> Any:
            rows = cs.IndexedSlices(np.full((1 + replica(), 2), 2, np.int32), [3] * (1 + int(replica())), (5, 2))
            return context().all_reduce(op, {"d": np.float32(1 + replica()), "r": [rows], "e": np.zeros((0, 3))})

        for op, number, value in (("SUM", 3, 2), ("MEAN", 1.5, 1)):
            result = pair.run(step, args=(op,))
            assert [float(x) for x in result["d"].values] == [number, number]
            assert [x.shape for x in result["e"].values] == [(0, 3), (0, 3)]
            for rows in result["r"][0].values:
                np.testing.assert_array_equal(rows.values, np.full((3, 2), value))
                np.testing.assert_array_equal(rows.indices, [3, 3, 3])
                assert rows.dense_shape == (5, 2)
                assert rows.values.dtype == (np.int32 if op == "SUM" else np.float64)

    def test_rows_of_different_tables(self, pair: cs.CentralStorageStrategy) -> None:
        def step(shapes: Any) -> Any:
            return context().all_reduce("SUM", cs.IndexedSlices(np.ones((1, 2)), [0], shapes[int(replica())]))

        with pytest.raises(ValueError, match="one dense shape"):
            pair.run(step, args=([(4, 2), (5, 2)],))
        assert pair.run(step, args=([None, None],)).values[1].dense_shape is None

    def test_gathering_uneven_and_empty_shares(self, pair: cs.CentralStorageStrategy) -> None:
        def step(lengths: Any) -> Any:
            length = lengths[int(replica())]
            return context().all_gather({"a": np.full((length, 1), replica()), "b": [np.ones((2, length))[:, :1]]}, 0)

        result = pair.run(step, args=([2, 1],))
        assert [x.tolist() for x in result["a"].values] == [[[0], [0], [1]]] * 2
        assert [x.shape for x in result["b"][0].values] == [(4, 1)] * 2
        empty = pair.run(lambda: context().all_gather(np.arange(2 * int(replica())), axis=-1))
        assert [x.tolist() for x in empty.values] == [[0, 1]] * 2

    def test_gather_and_reduce(self, pair: cs.CentralStorageStrategy) -> None:
        share = pair.run(lambda: np.arange(1.0, 4 - 2 * replica(), dtype=np.float32))
        np.testing.assert_array_equal(pair.gather(share, axis=0), [1, 2, 3, 1])
        assert pair.reduce("MEAN", share, axis=0) == np.float32(7 / 4)
        assert pair.reduce("SUM", share, axis=(0,)) == 7
        with pytest.raises(ValueError, match="one value per replica"):
            pair.reduce("SUM", {"a": share}, axis=None)
        with pair.scope():
            np.testing.assert_array_equal(pair.gather(share, axis=-1), [1, 2, 3, 1])

    def test_one_replica_gets_what_it_gave(self, alone: cs.CentralStorageStrategy) -> None:
        def step() -> Any:
            rows = cs.IndexedSlices(np.ones((1, 2)), [0], (3, 2))
            nest = {"a": np.arange(3), "r": rows}
            reduced = context().all_reduce("MEAN", nest)
            assert reduced["r"] is rows
            assert np.shares_memory(reduced["a"], nest["a"])
            array = np.arange(3)
            gathered = context().all_gather(array, axis=0, options=cs.CommunicationOptions())
            assert np.shares_memory(gathered, array)
            assert isinstance(replica(), np.ndarray)
            return array

        np.testing.assert_array_equal(alone.run(step, options=cs.RunOptions()), [0, 1, 2])
        values = alone.experimental_distribute_values_from_function(lambda c: [c.replica_id_in_sync_group])
        assert isinstance(values[0], cs.PerReplica)
        assert alone.run(lambda x: x, args=(values,)) == [0]


def test_a_method_may_be_frozen(pair: cs.CentralStorageStrategy) -> None:
    class Model:
        def __init__(self, scale: float) -> None:
            self.scale = scale
            self.w = cs.Variable(np.zeros(2), name="of a model")

        @cs.function
        def step(self, x: np.ndarray) -> np.ndarray:
            self.w.assign_add(self.scale * x)
            return self.w.numpy()

    one, ten = Model(1.0), Model(10.0)
    for model in (one, ten, one):
        pair.run(model.step, args=(np.ones(2),))
    one.scale = 100.0  # too late: it was sent
    pair.run(one.step, args=(np.ones(2),))
    np.testing.assert_array_equal((one.w.numpy(), ten.w.numpy()), ([6.0, 6.0], [20.0, 20.0]))


def test_merge_call_says_what_it_takes(pair: cs.CentralStorageStrategy) -> None:
    with pytest.raises(TypeError, match="merge_fn must be callable"):
        pair.run(lambda: context().merge_call(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"args=\(x,\)"):
        pair.run(lambda: context().merge_call(lambda strategy, x: x, 3))  # type: ignore[arg-type]


def test_a_merge_function_has_the_whole_extended(pair: cs.CentralStorageStrategy) -> None:
    with pair.scope():
        v = cs.Variable(np.zeros(2, np.float32), name="merged")
        with pair.extended.colocate_vars_with(v):
            w = cs.Variable(np.zeros(2, np.float32), name="beside")
    assert w.device == v.device
    assert pair.extended.variable_created_in_scope(v)

    def merge(strategy: Any, x: Any) -> Any:
        extended = strategy.extended
        total = extended.reduce_to("SUM", x, v)
        extended.update(v, lambda var, by: var.assign_add(by), args=(total,))
        one, both = extended.batch_reduce_to("MEAN", [(x, v), (x, x)])
        assert isinstance(both, cs.Mirrored)
        extended.update(w, lambda var, by: var.assign(by), args=(both,))
        (name,) = extended.update_non_slot(w, lambda: w.name, group=False)
        assert name == w.name
        assert extended.non_slot_devices([v, w]) is w
        np.testing.assert_array_equal(extended.read_var(w), one)
        inner = extended.call_for_each_replica(lambda y: y + replica(), [extended.broadcast_to(10, x)])
        with strategy.scope():
            gathered = strategy.gather(strategy.run(lambda y: y, args=(x,)), axis=0)
        values = strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
        return strategy.reduce("SUM", inner, axis=None), gathered, values, extended.worker_devices

    def step() -> Any:
        return context().merge_call(merge, args=(np.full(2, 1 + replica(), np.float32),))

    total, gathered, values, devices = pair.run(step)
    assert total == 21
    np.testing.assert_array_equal(gathered, [1, 1, 2, 2])
    assert pair.experimental_local_results(values) == (0, 1)
    assert devices == pair.extended.worker_devices
    np.testing.assert_array_equal(v.numpy(), [3, 3])
    np.testing.assert_array_equal(w.numpy(), [1.5, 1.5])


class TestLogicalDevices:
    def test_pieces_lie_on_the_replicas_devices(self, pair: cs.CentralStorageStrategy) -> None:
        def step(x: Any) -> Any:
            split = pair.experimental_split_to_logical_devices(x, [1, 2])
            both = pair.experimental_replicate_to_logical_devices(split)
            second = pair.experimental_assign_to_logical_device(both, 1)
            pieces = [(piece.device, piece.value) for piece in split.pieces]
            total = context().all_reduce("SUM", second)
            return pieces, [piece.device for piece in both.pieces + second.pieces], split, second * 2, total

        x = np.arange(8, dtype=np.float32).reshape(2, 4)
        pieces, where, whole, doubled, total = pair.run(step, args=(x,))
        for number, (device, value) in enumerate(pieces):
            assert pair.experimental_local_results(device) == (CPU + str(number), CPU + str(2 + number))
            for part in value.values:
                np.testing.assert_array_equal(part, x[:, 2 * number : 2 * number + 2])
        assert [name.values[0] for name in where] == [CPU + "0", CPU + "1", CPU + "1"]
        for one in whole.values:
            np.testing.assert_array_equal(one, x)
        for one in (*doubled.values, *total.values):
            np.testing.assert_array_equal(one, 2 * x)

    def test_what_does_not_fit(self, pair: cs.CentralStorageStrategy) -> None:
        x = np.zeros((2, 4))

        def step() -> None:
            for act in (
                lambda: pair.experimental_assign_to_logical_device(x, 2),
                lambda: pair.experimental_split_to_logical_devices(x, [2]),
                lambda: pair.experimental_split_to_logical_devices(x, [2, 2]),
                lambda: pair.experimental_split_to_logical_devices(np.zeros((2, 3)), [1, 2]),
            ):
                with pytest.raises(ValueError, match=r"logical device|partition_dimensions|axis 1"):
                    act()

        pair.run(step)
        step()  # what is wrong is said outside a replica, too
        for act in (
            lambda: pair.experimental_replicate_to_logical_devices(x),
            lambda: pair.experimental_assign_to_logical_device(x, 1),
            lambda: pair.experimental_split_to_logical_devices(x, [1, 2]),
        ):
            with pytest.raises(RuntimeError, match="inside a replica function"):
                act()

    def test_convert_to_tensor(self, pair: cs.CentralStorageStrategy) -> None:
        def step() -> Any:
            array = np.arange(3)
            with cs.device("/cpu:3"):
                assert np.shares_memory(cs.convert_to_tensor(array), array)
            return cs.convert_to_tensor(["a", "b"]), cs.convert_to_tensor(2.5)

        texts, number = pair.run(step)
        assert texts.values[1].tolist() == ["a", "b"]
        assert number.values[0].dtype == np.float32


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("cs.get_strategy()", "<the default strategy: one local replica>"),
        pytest.param("cs.has_strategy()", "False", marks=pytest.mark.slow),
        pytest.param("cs.in_cross_replica_context()", "False", marks=pytest.mark.slow),
        ("cs.get_replica_context()", "<ReplicaContext replica 0 of 1>"),
    ],
)
def test_the_context_can_be_the_first_thing_a_program_asks_for(first: str, said: str) -> None:
    assert run("-c", f"import central_storage as cs; print({first})").ok().out == f"{said}\n"
