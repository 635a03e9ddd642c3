"""Where a thread is: scopes, the default strategy, and what each place allows. No service is started."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import central_storage as cs


def strategy() -> cs.CentralStorageStrategy:
    """A strategy of two replicas over no service: enough for everything that asks only where it is."""
    nothing: Any = None
    return cs.CentralStorageStrategy.from_backend(nothing, ["cpu:0", "cpu:1"], "cpu:0")


@pytest.fixture(autouse=True)
def _outside() -> Iterator[None]:
    yield
    assert not cs.has_strategy(), "a test left a scope open"


def where() -> tuple[bool, Any, bool, bool]:
    return cs.has_strategy(), cs.get_strategy(), cs.in_cross_replica_context(), cs.get_replica_context() is None


def test_outside_everything() -> None:
    default = cs.get_strategy()
    assert where() == (False, default, False, False)
    replica = cs.get_replica_context()
    assert replica is not None
    assert type(replica.replica_id_in_sync_group) is int
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (0, 1)
    assert replica.strategy is default
    assert cs.get_array_module() is np


def test_a_scope_may_be_nested_in_itself() -> None:
    s = strategy()
    manager = s.scope()
    with manager as entered, s.scope() as again, manager:
        assert entered is again is s
        assert where() == (True, s, True, True)
    assert not cs.has_strategy()


@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, cs.errors.UsedScopeError])
def test_a_manager_is_not_entered_after_it_was_left(kind: type[Exception]) -> None:
    manager = strategy().scope()
    with manager:
        pass
    with pytest.raises(kind, match="scope\\(\\) for a new one"), manager:
        pass


def test_a_scope_is_left_on_an_exception() -> None:
    s = strategy()
    with pytest.raises(KeyError), s.scope():
        raise KeyError
    assert where()[0] is False


def test_only_the_innermost_context_is_left() -> None:
    default = cs.get_strategy()
    manager = default.scope()
    with pytest.raises(RuntimeError, match="innermost"):
        manager.__exit__(None, None, None)
    with manager, pytest.raises(RuntimeError, match="innermost"):
        default.run(lambda: manager.__exit__(None, None, None))
    assert not cs.in_cross_replica_context()


def test_the_scope_of_another_strategy() -> None:
    s, other = strategy(), strategy()
    refused: list[Callable[[], Any]] = [
        lambda: other.scope().__enter__(),
        lambda: other.run(lambda: 1),
        lambda: other.reduce("SUM", cs.PerReplica([np.ones(1)] * 2), axis=None),
        lambda: other.gather(np.ones(1), axis=0),
        lambda: other.extended.reduce_to("SUM", cs.PerReplica([np.ones(1)] * 2), "cpu:0"),
        lambda: other.extended.batch_reduce_to("SUM", [(np.ones(1), "cpu:0")]),
        lambda: other.extended.broadcast_to(np.ones(1), "cpu:0"),
        lambda: other.experimental_distribute_dataset(cs.data.Dataset.range(2).batch(2)),
        lambda: cs.experimental_set_strategy(other),
    ]
    with s.scope():
        for act in refused:
            with pytest.raises(RuntimeError):
                act()
        assert other.experimental_local_results(cs.PerReplica([1, 2])) == (1, 2)
        assert other.experimental_distribute_values_from_function(lambda c: c).values[1] == cs.ValueContext(1, 2)
        assert where()[1] is s


def test_contexts_belong_to_threads() -> None:
    s, seen = strategy(), []
    with s.scope():
        thread = threading.Thread(target=lambda: seen.append(where()))
        thread.start()
        thread.join()
    assert seen == [(False, cs.get_strategy(), False, False)]


def test_set_strategy() -> None:
    s, other = strategy(), strategy()
    cs.experimental_set_strategy(s)
    assert where() == (True, s, True, True)
    with s.scope(), pytest.raises(RuntimeError, match="leave that first"):
        cs.experimental_set_strategy(None)
    with pytest.raises(RuntimeError), other.scope():
        pass
    cs.experimental_set_strategy(other)
    assert cs.get_strategy() is other
    cs.experimental_set_strategy(None)
    assert not cs.has_strategy()
    with pytest.raises(TypeError, match="strategy or None"):
        cs.experimental_set_strategy("cpu:0")  # type: ignore[arg-type]


def test_copies() -> None:
    for s in (strategy(), cs.get_strategy()):
        with pytest.raises(RuntimeError, match="one service"):
            copy.copy(s)
        assert copy.deepcopy(s) is s
    with pytest.raises(TypeError, match="state in its service"):
        pickle.dumps(strategy())


class TestDefaultStrategy:
    """``get_strategy()`` outside every scope: one local replica."""

    def test_run(self) -> None:
        default, thing = cs.get_strategy(), object()

        def fn(x: Any, *, y: Any) -> Any:
            replica = cs.get_replica_context()
            assert replica is not None
            assert where() == (False, default, False, False)
            assert replica.replica_id_in_sync_group == 0
            assert np.shares_memory(replica.all_reduce("SUM", x), x)
            with pytest.raises(RuntimeError, match="inside a replica"):
                default.run(lambda: 1)
            with pytest.raises(RuntimeError, match="inside a replica"), default.scope():
                pass
            return x, y, replica

        x = np.ones(2)
        given, same, replica = default.run(fn, (x,), {"y": thing})
        assert np.shares_memory(given, x)
        assert same is thing
        with pytest.raises(RuntimeError, match="has ended"):
            replica.all_reduce("SUM", x)

    def test_a_per_replica_of_one_goes_in_bare(self) -> None:
        default = cs.get_strategy()
        values = default.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync)
        assert default.run(lambda x: x + 1, (values,)) == 2

    def test_merge_call_is_in_the_cross_replica_context(self) -> None:
        replica = cs.get_replica_context()
        assert replica is not None
        found = replica.merge_call(lambda s, x, *, y: (where(), s, x, y), (3,), {"y": 4})
        assert found == ((False, replica.strategy, True, True), replica.strategy, 3, 4)

    def test_scope(self) -> None:
        default, s = cs.get_strategy(), strategy()
        with default.scope() as entered, default.scope():
            assert entered is default
            assert where() == (False, default, False, False)
            with s.scope():
                assert where() == (True, s, True, True)
            assert s.reduce("SUM", cs.PerReplica([1, 2]), axis=None) == 3
        with s.scope(), pytest.raises(RuntimeError), default.scope():
            pass

    def test_combining(self) -> None:
        default = cs.get_strategy()
        assert default.reduce("SUM", np.arange(3), axis=0) == 3
        assert default.reduce("MEAN", 2.0, axis=None) == 2.0
        np.testing.assert_array_equal(default.gather(np.arange(3), axis=0), np.arange(3))
        assert default.experimental_local_results((1, 2)) == ((1, 2),)
        assert default.num_replicas_in_sync == 1
        assert default.cluster_resolver is None
        assert default.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync) == 1

    def test_data_sets(self) -> None:
        default, batches = cs.get_strategy(), cs.data.Dataset.range(5).batch(2)
        rows = [[0, 1], [2, 3], [4]]
        assert [batch.tolist() for batch in default.experimental_distribute_dataset(batches)] == rows
        assert [batch.tolist() for batch in default.distribute_datasets_from_function(lambda _: batches)] == rows

    def test_its_devices(self) -> None:
        cpu = "/job:localhost/replica:0/task:0/device:CPU:0"
        default = cs.get_strategy()
        assert default.extended.worker_devices_by_replica == [[cpu]]
        assert default.extended.parameter_devices == (cpu,)
        split = default.experimental_split_to_logical_devices(np.arange(4), [1])
        assert [piece.device for piece in split.pieces] == [cpu]
        with pytest.raises(cs.errors.ShutdownError, match="make a CentralStorageStrategy"):
            _ = default.controller


class TestDefaultContext:
    """What the default replica context answers: one replica, so everything is as it was."""

    def test_identity(self) -> None:
        replica = cs.get_replica_context()
        assert replica is not None
        value = {"a": np.arange(3), "b": [np.zeros((0, 2)), cs.IndexedSlices(np.ones((1, 2)), [0], (3, 2))]}
        reduced = replica.all_reduce("MEAN", value)
        assert reduced["b"][1] is value["b"][1]
        rows = [np.zeros((1, 2)), np.ones((3, 2))]
        gathered = replica.all_gather(rows, axis=-1, options=cs.CommunicationOptions())
        for got, given in zip([reduced["a"], *gathered], [value["a"], *rows], strict=True):
            assert np.shares_memory(got, given)
            assert isinstance(got, cs.Tensor)
        assert replica.all_gather([], axis=0) == []
        assert len(replica.all_gather(rows, axis=7)) == 2

    @pytest.mark.parametrize(
        ("act", "kind"),
        [
            (lambda c: c.all_reduce("SUM", []), IndexError),
            (lambda c: c.all_reduce("SUM", 1.0), ValueError),
            (lambda c: c.all_reduce("SUM", None), AttributeError),
            (lambda c: c.all_reduce("MAX", np.ones(1)), ValueError),
            (lambda c: c.all_reduce(3, np.ones(1)), ValueError),
            (lambda c: c.all_gather(1.0, axis=0), ValueError),
            (lambda c: c.all_gather(cs.IndexedSlices(np.ones((1, 2)), [0]), axis=0), NotImplementedError),
        ],
    )
    def test_what_is_refused(self, act: Callable[[Any], Any], kind: type[Exception]) -> None:
        with pytest.raises(kind):
            act(cs.get_replica_context())

    def test_it_is_not_current_inside_a_scope(self) -> None:
        replica = cs.get_replica_context()
        assert replica is not None
        acts: list[Callable[[], Any]] = [
            lambda: replica.merge_call(lambda s: 1),
            lambda: replica.all_reduce("SUM", np.ones(1)),
            lambda: replica.all_gather(np.ones(1), axis=0),
        ]
        with strategy().scope():
            for act in acts:
                with pytest.raises(RuntimeError, match="get_replica_context"):
                    act()


class TestOlderNames:
    """They work, and say once for each strategy what to use instead."""

    def test_run(self) -> None:
        default = type(cs.get_strategy())()
        with pytest.warns(DeprecationWarning, match="experimental_run_v2 is deprecated; use run$") as told:
            assert default.experimental_run_v2(lambda x: x, (1,)) == 1
        assert [warning.filename for warning in told] == [__file__]
        # Warnings are errors here, so a second one would be seen.
        assert default.experimental_run_v2(lambda x: x, args=(2,), kwargs={}, options=cs.RunOptions()) == 2

    def test_data_sets(self) -> None:
        default = type(cs.get_strategy())()
        with pytest.warns(DeprecationWarning, match="use distribute_datasets_from_function"):
            dataset = default.experimental_distribute_datasets_from_function(lambda _: cs.data.Dataset.range(2))
        assert [int(x) for x in dataset] == [0, 1]
        with pytest.warns(DeprecationWarning, match="from_tensor_slices"):
            assert [int(x) for x in default.experimental_make_numpy_dataset(np.arange(2))] == [0, 1]

    def test_keywords_and_properties(self) -> None:
        replica = type(cs.get_strategy())().replica_context
        with pytest.warns(DeprecationWarning, match="worker_devices_by_replica"):
            assert replica.devices == ("/job:localhost/replica:0/task:0/device:CPU:0",)
        default = cs.get_replica_context()
        assert default is not None
        with pytest.warns(DeprecationWarning, match="experimental_hints is deprecated; use options"):
            default.all_reduce("SUM", np.ones(1), experimental_hints=cs.CommunicationOptions())


def test_the_data_set_function_is_called_in_the_context_of_the_caller() -> None:
    s, seen = strategy(), []

    def make(_: cs.InputContext) -> Any:
        seen.append(where())
        return cs.data.Dataset.range(2)

    with s.scope():
        s.distribute_datasets_from_function(make)
    s.distribute_datasets_from_function(make)
    assert seen == [(True, s, True, True), (False, cs.get_strategy(), False, False)]
