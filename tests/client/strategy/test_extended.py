"""``strategy.extended`` without a service: what is combined, delivered, refused and told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import central_storage as cs

NOTHING: Any = None
CPU = "/job:localhost/replica:0/task:0/device:CPU:"


@pytest.fixture
def s() -> cs.CentralStorageStrategy:
    """A strategy of two replicas, with two devices each, over no service."""
    return cs.CentralStorageStrategy.from_backend(NOTHING, ["cpu:0+cpu:1", "cpu:2+cpu:3"], "cpu:4")


def per_replica(*values: Any) -> cs.PerReplica:
    return cs.PerReplica([np.asarray(value, np.float32) for value in values])


def test_a_strategy_has_one(s: cs.CentralStorageStrategy) -> None:
    assert s.extended is s.extended
    assert cs.get_strategy().extended is cs.get_strategy().extended


class TestReduceTo:
    def test_one_array_for_one_place(self, s: cs.CentralStorageStrategy) -> None:
        v = cs.Variable([0.0, 0.0])
        for destination in ("/cpu:1", CPU + "7", np.zeros(3), v):
            reduced = s.extended.reduce_to("sum", per_replica([1, 2], [3, 4]), destination)
            np.testing.assert_array_equal(reduced, [4, 6])
            assert reduced.dtype == np.float32
        np.testing.assert_array_equal(v.numpy(), [0, 0])

    @pytest.mark.parametrize("destination", [per_replica(0, 0), cs.Mirrored([0, 0])])
    def test_a_copy_for_each_replica(self, s: cs.CentralStorageStrategy, destination: Any) -> None:
        reduced = s.extended.reduce_to(cs.ReduceOp.MEAN, per_replica([1, 2], [3, 4]), destination)
        assert isinstance(reduced, cs.Mirrored)
        first, second = reduced.values
        first[0] = 9
        np.testing.assert_array_equal(second, [2, 3])

    def test_rows(self, s: cs.CentralStorageStrategy) -> None:
        slices = cs.PerReplica([cs.IndexedSlices([[float(row)]], [row], (3, 1)) for row in range(2)])
        for rows in s.extended.reduce_to("MEAN", slices, slices).values:
            np.testing.assert_array_equal(rows.indices, [0, 1])
            np.testing.assert_array_equal(rows.values, [[0], [0.5]])

    def test_a_plain_value(self, s: cs.CentralStorageStrategy) -> None:
        thing = np.ones(2)
        assert np.shares_memory(s.extended.reduce_to("MEAN", thing, per_replica(0, 0)), thing)
        with pytest.raises(ValueError, match="count once"):
            s.extended.reduce_to("SUM", thing, "cpu:0")
        alone = cs.CentralStorageStrategy.from_backend(NOTHING, ["cpu:0"], "cpu:0")
        np.testing.assert_array_equal(alone.extended.reduce_to("SUM", thing, cs.PerReplica([0])), thing)
        np.testing.assert_array_equal(alone.extended.broadcast_to(thing, cs.PerReplica([0])), thing)

    @pytest.mark.parametrize(
        ("destination", "kind"),
        [
            (["/cpu:0"], AssertionError),
            (("/cpu:0",), AssertionError),
            (None, ValueError),
            (3, ValueError),
            ("", ValueError),
            ("nowhere", cs.errors.DeviceError),
            ("gpu:9000", cs.errors.DeviceError),
        ],
    )
    def test_what_is_no_destination(
        self, s: cs.CentralStorageStrategy, destination: Any, kind: type[Exception]
    ) -> None:
        with pytest.raises(kind):
            s.extended.reduce_to("SUM", per_replica(1, 2), destination)
        with pytest.raises(kind):
            s.extended.batch_reduce_to("SUM", [(per_replica(1, 2), destination)])
        with pytest.raises(AssertionError if destination is None else kind):
            s.extended.broadcast_to(np.ones(1), destination)

    def test_what_is_no_op(self, s: cs.CentralStorageStrategy) -> None:
        for act in (
            lambda op: s.extended.reduce_to(op, per_replica(1, 2), "cpu:0"),
            lambda op: s.extended.batch_reduce_to(op, [(per_replica(1, 2), "cpu:0")]),
        ):
            with pytest.raises(AssertionError):
                act(3)
            with pytest.raises(ValueError, match="MAX"):
                act("MAX")

    def test_the_older_keyword(self, s: cs.CentralStorageStrategy) -> None:
        hints = cs.CommunicationOptions()
        with pytest.warns(DeprecationWarning, match="use options"):
            assert s.extended.reduce_to("SUM", per_replica(1, 2), "cpu:0", experimental_hints=hints) == 3
        pairs = [(per_replica(1, 2), "cpu:0")]
        assert s.extended.batch_reduce_to("SUM", pairs, experimental_hints=hints) == [3]  # it has been said


def test_batch_reduce_to(s: cs.CentralStorageStrategy) -> None:
    pairs = [(per_replica(1, 2), "/cpu:0"), (per_replica([5], [7]), per_replica(0, 0)), (np.float32(1), "/cpu:0")]
    one, both, plain = s.extended.batch_reduce_to(cs.ReduceOp.SUM, pairs, cs.CommunicationOptions())
    assert one == 3
    assert [value.tolist() for value in both.values] == [[12], [12]]
    assert plain == 1
    with pytest.raises(IndexError, match="at least one pair"):
        s.extended.batch_reduce_to("SUM", [])


def test_broadcast_to(s: cs.CentralStorageStrategy) -> None:
    mirrored = s.extended.broadcast_to([1.0, 2.0], per_replica(0, 0))
    assert isinstance(mirrored, cs.Mirrored)
    assert [value.tolist() for value in mirrored.values] == [[1, 2], [1, 2]]
    np.testing.assert_array_equal(s.extended.broadcast_to(np.arange(2), "cpu:0"), [0, 1])
    assert s.extended.broadcast_to(2, per_replica(0, 0)) == 2


class TestUpdate:
    def test_the_function_runs_here_in_the_cross_replica_context(self, s: cs.CentralStorageStrategy) -> None:
        v = cs.Variable(1.0)

        def fn(var: cs.Variable, by: Any, *, times: int) -> tuple[bool, Any]:
            assert var is v
            assert cs.get_strategy() is s
            assert cs.get_replica_context() is None
            var.assign_add(by * np.float32(times))
            return cs.in_cross_replica_context(), {"a": 1}

        by = cs.Mirrored([np.float32(2), np.float32(2)])
        assert s.extended.update(v, fn, (by,), {"times": 3}) == (True, {"a": 1})
        assert s.extended.update(v, fn, (by,), {"times": 1}, group=False) == ((True,), {"a": (1,)})
        assert v.numpy() == 9
        assert not cs.has_strategy()

    def test_without_a_variable(self, s: cs.CentralStorageStrategy) -> None:
        v = cs.Variable(1.0)
        assert s.extended.update_non_slot(v, lambda a, b: (a, b), (1,), {"b": 2}) == (1, 2)
        assert s.extended.update_non_slot(v, lambda a: [a], (1,), group=False) == [(1,)]

    def test_what_is_refused(self, s: cs.CentralStorageStrategy) -> None:
        with pytest.raises(ValueError, match="a variable"):
            s.extended.update(3.0, lambda v: v)  # type: ignore[arg-type]
        for arguments in (((per_replica(1, 2),), {}), ((), {"by": [per_replica(1, 2)]})):
            with pytest.raises(ValueError, match="cannot take a PerReplica"):
                s.extended.update(cs.Variable(1.0), lambda v, by: v, *arguments)
        with pytest.raises(ZeroDivisionError):
            s.extended.update(cs.Variable(1.0), lambda v: 1 // 0)
        assert not cs.has_strategy()


def test_variables_of_nobody(s: cs.CentralStorageStrategy) -> None:
    v = cs.Variable(1.0, name="b")
    assert s.extended.value_container(v) is v
    assert s.extended.value_container(3) == 3
    assert not s.extended.variable_created_in_scope(v)
    assert not s.extended.variable_created_in_scope(3)
    assert s.extended.non_slot_devices([v, cs.Variable(1.0, name="a")]).name == "a"
    with pytest.raises(ValueError, match="at least one variable"):
        s.extended.non_slot_devices([])
    assert s.extended.read_var(v) == 1
    assert s.extended.read_var(2.5).dtype == np.float32
    with pytest.raises(RuntimeError, match=r"scope\(\)"):
        s.extended.colocate_vars_with(v)
    with s.scope():
        for wrong in (v, 3):
            with pytest.raises(ValueError, match="made under this strategy"):
                s.extended.colocate_vars_with(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (np.float32(1), ValueError),
        ((np.ones(2), np.ones(3)), ValueError),
        (3, AttributeError),
        ([1, 2], AttributeError),
    ],
)
def test_numpy_data_sets(s: cs.CentralStorageStrategy, given: Any, kind: type[Exception]) -> None:
    rows = s.extended.experimental_make_numpy_dataset({"x": np.arange(2)}, session=None)
    assert [int(row["x"]) for row in rows] == [0, 1]
    with pytest.raises(kind):
        s.extended.experimental_make_numpy_dataset(given)


def test_devices_and_constants(s: cs.CentralStorageStrategy) -> None:
    e = s.extended
    assert e.worker_devices_by_replica == [[CPU + "0", CPU + "1"], [CPU + "2", CPU + "3"]]
    assert e.worker_devices == [CPU + str(number) for number in range(4)]
    assert e.parameter_devices == (CPU + "4",)
    assert s.num_replicas_in_sync == 2
    constants: list[Callable[[cs.StrategyExtended], bool]] = [
        lambda x: x.experimental_between_graph,
        lambda x: x.experimental_should_init,
        lambda x: x.should_checkpoint,
        lambda x: x.should_save_summary,
    ]
    assert all(constant(e) is True for constant in constants)
    assert e.experimental_require_static_shapes is False
