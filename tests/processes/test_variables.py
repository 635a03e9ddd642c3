"""Variables over a real service: made everywhere, written everywhere, and what every replica reads meanwhile."""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.replicas import replica
from tests.harness.services import connected

import central_storage as cs

F32 = np.float32
NONE, SUM, MEAN, FIRST = cs.VariableAggregation


@pytest.fixture(scope="module")
def counted() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy for the tests that count variables."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield connected(strategy)


@pytest.fixture
def quiet(counted: cs.CentralStorageStrategy) -> cs.CentralStorageStrategy:
    """That strategy, when nothing in this process is about to free more of what others have made in it."""
    gc.collect()
    return counted


def made(s: cs.CentralStorageStrategy, value: Any, **options: Any) -> cs.Variable:
    with s.scope():
        return cs.Variable(value, **options)


def slices(value: Any, *rows: int) -> cs.IndexedSlices:
    return cs.IndexedSlices(np.full(len(rows), value, F32), np.array(rows))


def lists(value: Any) -> list[Any]:
    """The components of a PerReplica of arrays."""
    return [component.tolist() for component in value.values]


# --- aggregation × synchronization ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:synchronization=ON_READ has no effect:UserWarning")
@pytest.mark.parametrize("synchronization", list(cs.VariableSynchronization))
@pytest.mark.parametrize(
    ("aggregation", "combined"), [(NONE, None), (SUM, 30.0), (MEAN, 15.0), (FIRST, 10.0)], ids=lambda x: str(x)
)
def test_an_assign_of_arrays_is_applied_once(
    two: cs.CentralStorageStrategy, aggregation: Any, combined: float | None, synchronization: Any
) -> None:
    v = made(two, 1.0, aggregation=aggregation, synchronization=synchronization)
    assert v.synchronization is synchronization
    operations: list[Callable[[Any], Any]] = [v.assign, v.assign_add, v.assign_sub]
    for operation in operations:
        name = operation.__name__

        def step(name: str = name) -> Any:
            return getattr(v, name)(F32(10) * F32(replica() + 1)) + F32(0)

        if combined is None:
            with pytest.raises(ValueError, match="aggregation is NONE"):
                two.run(step)
            continue
        v.assign(1.0)
        expected = {"assign": combined, "assign_add": 1 + combined, "assign_sub": 1 - combined}[name]
        assert lists(two.run(step)) == [expected, expected]
        assert float(v) == expected


@pytest.mark.parametrize(("aggregation", "expected"), [(MEAN, 6.0), (FIRST, 6.0)])
def test_the_same_python_number_counts_once(two: cs.CentralStorageStrategy, aggregation: Any, expected: float) -> None:
    v = made(two, 1.0, aggregation=aggregation)
    two.run(lambda: v.assign_add(5.0))
    assert float(v) == expected


def test_the_same_python_number_from_all_under_sum_is_never_added_silently(two: cs.CentralStorageStrategy) -> None:
    v = made(two, 1.0, aggregation=SUM)
    with pytest.raises(ValueError, match="same Python number"):
        two.run(lambda: v.assign_add(5.0))
    with pytest.raises(ValueError, match="SUM"):
        two.run(lambda: v.assign(v.numpy().tolist() if v.shape else [1.0]))
    two.run(lambda: v.assign_add(float(replica())))
    assert float(v) == 2
    two.run(lambda: v.assign(v + 1))  # N times (v + 1): what each replica brings is added
    assert float(v) == 6


def test_integers(two: cs.CentralStorageStrategy) -> None:
    total, mean = made(two, 1, aggregation=SUM), made(two, 1, aggregation=MEAN)
    two.run(lambda: total.assign_add(np.int32(replica() + 1)))
    assert int(total) == 4
    with pytest.raises(ValueError, match="floating-point"):
        two.run(lambda: mean.assign_add(np.int32(replica() + 1)))


# --- writes that need no agreement ----------------------------------------------------------------------------------


def test_a_variable_made_outside_every_scope_is_written_in_replica_order(two: cs.CentralStorageStrategy) -> None:
    v = cs.Variable(np.ones(2, F32), name="outside")
    v.assign_add([1.0, 1.0])

    def step() -> Any:
        v.assign(v + F32(replica() + 1))
        if replica() == 1:
            v.assign_add([10.0, 0.0])
        return v.numpy()

    assert v.strategy is None
    assert lists(two.run(step)) == [[3, 3], [14, 4]]
    assert v.strategy is two
    assert v.numpy().tolist() == [14, 4]  # replica 0 assigned first, then replica 1
    v.assign([0.0, 0.0])
    assert lists(two.run(step)) == [[1, 1], [12, 2]]
    assert two.run(lambda: v) is v
    assert v.name == "outside"


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_scatters_are_each_replicas_own(two: cs.CentralStorageStrategy, aggregation: Any) -> None:
    v = made(two, np.zeros(4, F32), aggregation=aggregation)

    def step() -> Any:
        v.scatter_add(slices(replica() + 1, 0, 0, 1))
        v.scatter_sub(slices(1, 2))
        if replica() == 1:
            v.scatter_update(cs.IndexedSlices(np.array([7, 8], F32), [3, 3]))
        own = v.numpy()
        cs.get_replica_context().all_reduce("SUM", np.ones(1))
        return own, v.numpy(), v.sparse_read([3, 0])

    own, after, rows = two.run(step)
    assert lists(own) == [[2, 1, -1, 0], [4, 2, -1, 8]]
    assert lists(after) == [[6, 3, -2, 8]] * 2
    assert lists(rows) == [[8, 6]] * 2
    assert v.numpy().tolist() == [6, 3, -2, 8]
    assert v.version == 5


def test_one_that_raises_leaves_what_it_wrote_before(two: cs.CentralStorageStrategy) -> None:
    v = made(two, np.zeros(2, F32))

    def step() -> None:
        v.scatter_add(slices(1, 0))
        if replica() == 1:
            raise ValueError("on purpose")
        cs.get_replica_context().all_reduce("SUM", np.ones(1))
        v.scatter_add(slices(1, 1))

    with pytest.raises(ValueError, match="on purpose"):
        two.run(step)
    assert v.numpy().tolist() == [2, 0]


def test_rows_and_scatters_in_the_cross_replica_context(two: cs.CentralStorageStrategy) -> None:
    table = made(two, np.arange(300_000, dtype=F32).reshape(-1, 3), name="table")
    values = np.ones((50_000, 3), F32)
    table.scatter_add(cs.IndexedSlices(values, np.arange(50_000)))  # larger than a frame, indices too
    assert table.sparse_read([[0], [99_999]]).tolist() == [[[1, 2, 3]], [[299_997, 299_998, 299_999]]]

    def merged(strategy: Any) -> Any:
        table.scatter_update(cs.IndexedSlices(-values, np.arange(50_000)))
        return table.sparse_read([1, 50_000])

    both = two.run(lambda: cs.get_replica_context().merge_call(merged))  # type: ignore[union-attr]
    for share in two.experimental_local_results(both):
        assert share.tolist() == [[-1, -1, -1], [150_000, 150_001, 150_002]]


def test_a_large_table_takes_the_memory_of_the_rows_that_are_named(two: cs.CentralStorageStrategy) -> None:
    def resident() -> int:
        """Bytes of parameters and slots that are there: what the server has mapped is shared with nobody else's."""
        smaps = Path(f"/proc/{two.statistics().pid}/smaps").read_text()
        found = re.findall(r"memfd:cs-\w+-(?:parameters|slots)/.*\n(?:.*\n)*?Rss: +(\d+) kB", smaps)
        return 1024 * sum(map(int, found))

    before = resident()
    table = made(two, np.zeros((1 << 20, 64), F32), sparse=True)  # 256 MiB, and as much for the accumulators
    with two.scope():
        optimizer = cs.optimizers.Adagrad(0.5, initial_accumulator_value=0.0)

    def step() -> Any:
        rows = np.array([7, 1 << 19, 7])
        read = cs.nn.embedding_lookup(table, rows)
        optimizer.apply_gradients([(cs.IndexedSlices(read + 1, rows, table.shape), table)])
        return read.sum()

    assert two.experimental_local_results(two.run(step)) == (0, 0)
    assert 4096 <= resident() - before <= 1 << 20
    assert cs.nn.embedding_lookup(table, [7, 8, 1 << 19])[:, 0].tolist() == [-0.5, 0, -0.5]


def test_local_variables_among_arguments_and_large_batches(two: cs.CentralStorageStrategy) -> None:
    """Taking a large variable along while arguments are being sent leaves these whole."""
    first, second, captured = (cs.Variable(np.full(100_000, n, F32), name="late") for n in range(3))
    batches = cs.PerReplica([np.full(100_000, 5, F32), np.full(100_000, 6, F32)])

    def step(batch: Any, nest: dict[str, Any]) -> list[float]:
        return [float(np.mean(batch)), float(np.mean(nest["v"])), float(np.mean(captured))]

    nest = {"v": cs.PerReplica([first, second])}
    assert two.experimental_local_results(two.run(step, args=(batches, nest))) == ([5.0, 0.0, 2.0], [6.0, 1.0, 2.0])
    assert {first.name, second.name, captured.name} == {"late", "late_1", "late_2"}


# --- where variables come from --------------------------------------------------------------------------------------


def test_names_are_unique(two: cs.CentralStorageStrategy) -> None:
    variables = [made(two, 0.0, name="unique") for _ in range(3)]
    assert [v.name for v in variables] == ["unique", "unique_1", "unique_2"]


def test_one_made_inside_run_is_replica_0s_and_the_same_everywhere(two: cs.CentralStorageStrategy) -> None:
    def step() -> Any:
        v = cs.Variable(lambda: np.full(2 + replica(), replica() + 1, F32), name="inside", aggregation=SUM)
        v.assign_add(np.ones(2, F32))
        return {"v": v}, v.numpy()

    nest, values = two.run(step)
    assert isinstance(nest["v"], cs.Variable)
    assert nest["v"].strategy is two
    assert lists(values) == [[3, 3]] * 2
    assert nest["v"].numpy().tolist() == [3, 3]

    def uneven() -> None:
        if replica() == 1:
            cs.Variable(1.0)

    with pytest.raises(RuntimeError, match="do not meet"):
        two.run(uneven)


def test_copies(two: cs.CentralStorageStrategy) -> None:
    v = made(two, [1.0, 2.0], name="original", aggregation=SUM)
    w = copy.deepcopy({"w": v})["w"]
    v.assign([0.0, 0.0])
    assert (w.numpy().tolist(), w.name, w.strategy, w.aggregation) == ([1, 2], "original_1", two, SUM)

    def step() -> Any:
        x = copy.deepcopy(w)
        x.assign_add(np.ones(2, F32))
        return x.numpy(), w.numpy()

    inside, outside = two.run(step)
    assert (lists(inside), lists(outside)) == ([[3, 4]] * 2, [[1, 2]] * 2)


def test_another_strategys_variable(two: cs.CentralStorageStrategy, quiet: cs.CentralStorageStrategy) -> None:
    v = made(two, 1.0, aggregation=SUM)
    with quiet.scope():
        assert v + 0.0 == 1
        with pytest.raises(RuntimeError, match="inside the scope of another"):
            v.assign(2.0)
    table = made(two, np.arange(40_000, dtype=F32))
    nest = [v, table]

    def step(argument: Any) -> Any:
        return argument + nest[0] - nest[0] + F32(1), nest[1].sparse_read([39_999]), float(np.sum(table))

    for value in (1.0, 2.0):
        v.assign(value)
        total, row, everything = quiet.run(step, args=(v,))
        assert lists(total) == [value + 1] * 2
        assert lists(row) == [[39_999]] * 2
        assert everything.values[0] == np.sum(np.arange(40_000, dtype=F32))
    for wrong in (lambda: v.assign_add(F32(1)), lambda: table.scatter_add(slices(1, 0))):
        with pytest.raises(RuntimeError, match="belongs to another strategy"):
            quiet.run(wrong)
    assert float(v) == 2


def test_dlpack_and_arrays_are_views_in_a_replica_and_copies_elsewhere(two: cs.CentralStorageStrategy) -> None:
    v = made(two, np.arange(5, dtype=F32))

    def step() -> Any:
        view, shared = np.asarray(v), np.from_dlpack(v)
        return np.shares_memory(view, shared), view.flags.writeable, shared.flags.writeable, v.numpy().flags.writeable

    assert two.run(step) == (True, False, False, True)
    copied = np.from_dlpack(v)
    v.assign(np.zeros(5, F32))
    assert copied.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [5, 100_000])
def test_what_dlpack_copies_begins_at_a_multiple_of_64_bytes(two: cs.CentralStorageStrategy, size: int) -> None:
    v = made(two, np.arange(size, dtype=F32))

    class Unversioned:  # as JAX sees it
        def __dlpack__(self, *, stream: Any = None) -> Any:
            return v.__dlpack__(stream=stream)

        def __dlpack_device__(self) -> Any:
            return v.__dlpack_device__()

    def look() -> tuple[int, bool, bool]:
        taken = np.from_dlpack(Unversioned())
        before = np.array_equal(taken, np.arange(size, dtype=F32))
        address = taken.__array_interface__["data"][0]
        ctypes.memset(address, 7, taken.nbytes)  # NumPy takes it for read-only, which not every consumer does
        return address % 64, before, bool(np.asarray(v)[1] == 1)

    assert two.run(look) == (0, True, True)
    kept = [np.from_dlpack(v) for _ in range(4)]
    assert [array.__array_interface__["data"][0] % 64 for array in kept] == [0] * 4
    for array in kept:
        array[:] = 7
    assert v.numpy()[1] == 1


def test_write_notes_of_steps_that_are_sent_ahead(two: cs.CentralStorageStrategy) -> None:
    v = cs.Variable(np.zeros(2, F32))
    table = made(two, np.zeros((50_000, 2), F32))

    def step(batch: Any) -> Any:
        before = v.numpy()[1]
        v.assign_add(np.full(2, np.sum(batch), F32))
        table.scatter_add(cs.IndexedSlices(np.full((20_000, 2), np.sum(batch), F32), np.arange(20_000)))
        return before

    batches = two.experimental_distribute_dataset(cs.data.Dataset.range(8).batch(2))
    results = list(two.run_steps(step, batches))
    assert [lists(result) for result in results] == [[0, 0], [1, 1], [6, 6], [15, 15]]
    assert v.numpy().tolist() == [28, 28]
    assert table.sparse_read([0, 19_999, 20_000]).tolist() == [[28, 28], [28, 28], [0, 0]]


# --- how they end -----------------------------------------------------------------------------------------------------


def test_what_nobody_holds_is_freed_before_the_next_operation(quiet: cs.CentralStorageStrategy) -> None:
    others = quiet.statistics().variables
    held = {"first": made(quiet, np.ones(1000, F32), name="first"), "kept": made(quiet, np.ones(10, F32), name="kept")}

    def total() -> float:
        return float(sum(np.sum(v) for v in held.values()))

    assert quiet.run(total).values == (1010.0, 1010.0)
    before = quiet.statistics()
    del held["first"]
    after = quiet.statistics()
    assert (before.variables - after.variables, before.parameter_nbytes - after.parameter_nbytes) == (1, 4000)
    held["again"] = again = made(quiet, np.full(900, 2, F32), name="first")
    assert (again.name, again.number) == ("first", held["kept"].number + 1)
    assert quiet.run(total).values == (1810.0, 1810.0)

    held["local"] = cs.Variable(np.ones(5, F32))
    assert quiet.run(total).values == (1815.0, 1815.0)
    del held["local"]
    assert quiet.statistics().variables == others + 2
    with quiet.scope():
        optimizer = cs.optimizers.SGD(0.1)
    held["trained"] = made(quiet, np.ones(3, F32))
    quiet.run(lambda: optimizer.apply_gradients([(np.ones(3, F32), held["trained"])]))
    del held["trained"]
    assert quiet.statistics().variables == others + 2


def test_functions_and_results_keep_variables(quiet: cs.CentralStorageStrategy) -> None:
    others = quiet.statistics().variables
    v = made(quiet, np.full(3, 7, F32))
    holder = [v]

    @cs.function
    def frozen() -> Any:
        return holder[0].numpy()

    assert lists(quiet.run(frozen)) == [[7, 7, 7]] * 2
    holder.clear()
    del v
    assert quiet.statistics().variables == others + 1
    made(quiet, np.zeros(3, F32))
    assert lists(quiet.run(frozen)) == [[7, 7, 7]] * 2  # as it was frozen

    kept: list[Any] = []

    @cs.function
    def keeping(argument: Any) -> Any:
        kept.append(argument)
        return kept[0].numpy()

    given = [made(quiet, np.full(3, n, F32)) for n in range(2)]
    for n in range(2):
        assert lists(quiet.run(keeping, args=(given[n],))) == [[0, 0, 0]] * 2
    given.clear()
    made(quiet, np.full(3, 9, F32))
    assert lists(quiet.run(keeping, args=(None,))) == [[0, 0, 0]] * 2

    def make() -> cs.Variable:
        return cs.Variable(np.ones(3, F32), aggregation=SUM)

    inside = quiet.run(make)
    count = quiet.statistics().variables
    del inside
    assert quiet.statistics().variables == count  # replicas may still hold it


def test_what_a_worker_keeps_of_a_freed_variable_is_not_the_next_one(quiet: cs.CentralStorageStrategy) -> None:
    def keep(v: cs.Variable) -> Any:
        import json  # lives on in the worker

        if not hasattr(json, "kept"):
            json.kept = v  # type: ignore[attr-defined]
        return json.kept.numpy()  # type: ignore[attr-defined]

    v = made(quiet, np.ones(3, F32))
    assert lists(quiet.run(keep, args=(v,))) == [[1, 1, 1]] * 2
    number = v.number
    del v
    w = made(quiet, np.full(3, 9, F32))
    with pytest.raises(cs.errors.InvalidArgumentError, match=rf"no variable {number}; .* is freed"):
        quiet.run(keep, args=(w,))
    assert lists(quiet.run(lambda: w.numpy())) == [[9, 9, 9]] * 2


def test_one_that_comes_back_is_not_freed(quiet: cs.CentralStorageStrategy) -> None:
    others = quiet.statistics().variables
    v = made(quiet, np.ones(3, F32))

    def step(v: cs.Variable) -> cs.Variable:
        return v

    arguments = [v]
    del v
    back = quiet.run(step, args=(arguments.pop(),))
    assert back.numpy().tolist() == [1, 1, 1]
    del back
    assert quiet.statistics().variables == others


# --- constraints ----------------------------------------------------------------------------------------------------


def test_a_constraint_follows_every_update(two: cs.CentralStorageStrategy) -> None:
    limit = 3.0
    with two.scope():
        free = cs.Variable(np.full(3, 5, F32))
        bound = cs.Variable(np.full(3, 5, F32), constraint=lambda x: np.clip(x, F32(0), F32(limit)))
        optimizer = cs.optimizers.SGD(1.0)

    def step() -> Any:
        optimizer.apply_gradients([(np.full(3, 0.5, F32), free), (np.full(3, 0.5, F32), bound)])
        return bound.numpy()

    assert lists(two.run(step)) == [[3, 3, 3]] * 2
    limit = 1.0
    assert lists(two.run(step)) == [[1, 1, 1]] * 2
    assert (free.numpy().tolist(), bound.numpy().tolist()) == ([3, 3, 3], [1, 1, 1])
    bound.assign(np.full(3, 9, F32))  # nothing but an update
    assert bound.numpy().tolist() == [9, 9, 9]


def test_a_constraint_must_give_such_a_value(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        v = cs.Variable(np.ones(3, F32), constraint=lambda x: x[:1])
        optimizer = cs.optimizers.SGD(1.0)
    with pytest.raises(ValueError, match=f"the constraint of {v.name} returned a value that does not fit.*has shape"):
        two.run(lambda: optimizer.apply_gradients([(np.ones(3, F32), v)]))


def test_a_function_that_reads_another_services_variable_says_so_once(
    two: cs.CentralStorageStrategy, own: cs.CentralStorageStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    v, quiet = made(two, 1.0), made(own, 1.0)
    for _ in range(2):
        own.run(lambda: v.numpy() + quiet.numpy())
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(said) == 1
    assert said[0].startswith(f"variable {v.name} belongs to another service than the strategy that runs this function")


def test_what_an_ended_service_had_says_so_after_a_new_strategy_was_made() -> None:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as old, old.scope():
        w, adam, mean = cs.Variable([1.0, 2.0], name="w"), cs.optimizers.Adam(), cs.metrics.Mean(name="mean")
        slot, step, rate = adam.get_slot(w, "m"), adam.iterations, adam.lr
    rows = cs.IndexedSlices([1.0], [0])
    uses: dict[str, list[Callable[[], Any]]] = {
        "variable w": [
            w.numpy,
            lambda: w + 1,
            lambda: w.version,
            lambda: w.sparse_read([0]),
            lambda: w.assign([0.0, 0.0]),
            lambda: w.scatter_add(rows),
        ],
        "variable mean/total": [mean.result, lambda: mean.update_state(1.0), mean.reset_state],
        "optimizer Adam": [
            lambda: int(step),
            lambda: float(rate),
            lambda: rate.assign(0.5),
            lambda: adam.weights,
            lambda: adam.learning_rate + 1,
        ],
        "slot w/m": [slot.numpy, lambda: slot.assign(np.zeros(2, F32))],
    }
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as new:
        for what, calls in uses.items():
            for call in calls:
                with pytest.raises(
                    cs.errors.ShutdownError, match=f"{what} belongs to another service, which has ended"
                ):
                    call()
        with pytest.raises(cs.errors.ShippingError, match="belongs to another service, which has ended"):
            new.run(lambda: w.numpy())
        with pytest.raises(cs.errors.ContextError, match="optimizer Adam belongs to another strategy"):
            new.run(lambda: adam.iterations)
        assert new.run(lambda: 1) == 1
