"""What a replica has read keeps its bits until its function returns, whoever writes the variable meanwhile."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.replicas import context
from tests.harness.services import connected

import central_storage as cs
from cs_runtime.shared_memory import mapping

F32 = np.float32
DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture(
    scope="module", params=["processes", *(pytest.param(way, marks=pytest.mark.slow) for way in ("threads", "carried"))]
)
def service(request: pytest.FixtureRequest) -> Iterator[cs.CentralStorageStrategy]:
    in_process = request.param in ("threads", "carried")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "carried":
            patch.setattr(mapping, "Mapping", not_mapped)
        with cs.CentralStorageStrategy(DEVICES, in_process=in_process) as strategy:
            yield connected(strategy, nested=in_process)


def not_mapped(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOMEM, "no address range is left")


def variables(strategy: cs.CentralStorageStrategy) -> list[cs.Variable]:
    """Two that share a page, and one of many pages."""
    with strategy.scope():
        return [
            cs.Variable(np.full(shape, start, F32), aggregation=cs.VariableAggregation.SUM)
            for start, shape in ((1, 3), (2, (4, 5)), (3, (300, 100)))
        ]


class Reader:
    """Everything by which the values of variables can be read without a copy, and what was seen there."""

    def __init__(self, *variables: cs.Variable) -> None:
        self.views: list[Any] = []
        for v in variables:
            view = np.asarray(v)
            later = [v[...], v[1:], view[..., 1:], v.T, np.from_dlpack(v), memoryview(v.current()), iter(v)]
            self.views += [view, view.reshape(-1).view(np.uint8), *later[:-1], *later[-1]]
        self.seen = [np.array(view) for view in self.views]

    def assert_kept(self) -> None:
        for view, seen in zip(self.views, self.seen, strict=True):
            np.testing.assert_array_equal(view, seen)


def applied(optimizer: Any, *variables: cs.Variable) -> None:
    optimizer.apply_gradients([(np.full(v.shape, -1, F32), v) for v in variables])


def assigned(optimizer: Any, *variables: cs.Variable) -> None:
    for v in variables:
        v.assign_add(np.ones(v.shape, F32))


def scattered(optimizer: Any, *variables: cs.Variable) -> None:
    for v in variables:
        row = np.ones((1, *v.shape[1:]), F32)
        v.scatter_add(cs.IndexedSlices(row, np.array([1])))
    context().all_reduce("SUM", np.ones(1))
    assigned(optimizer, *variables)


def merged(optimizer: Any, *variables: cs.Variable) -> None:
    def change(strategy: cs.CentralStorageStrategy) -> None:
        for v in variables:
            v.assign(np.asarray(v) * 3)

    context().merge_call(change)


def nested(optimizer: Any, *variables: cs.Variable) -> None:
    def change(strategy: cs.CentralStorageStrategy) -> None:
        strategy.run(lambda: applied(optimizer, *variables))
        strategy.run(lambda: assigned(optimizer, *variables))

    context().merge_call(change)


@pytest.mark.parametrize("change", [applied, assigned, scattered, merged, nested])
def test_what_was_read_before_an_update_of_ones_own_stays(
    service: cs.CentralStorageStrategy, change: Callable[..., None]
) -> None:
    known = variables(service)
    with service.scope():
        optimizer = cs.optimizers.SGD(1.0)

    def step() -> list[float]:
        first = Reader(*known)
        change(optimizer, *known)
        second = Reader(*known)
        change(optimizer, *known)
        third = Reader(*known)
        change(optimizer, *known)
        values = [float(v[-1] if v.ndim == 1 else v[-1, -1]) for v in known]
        for reader in (first, second, third):
            reader.assert_kept()
        return values

    for _ in range(2):
        for seen in service.experimental_local_results(service.run(step)):
            assert len(seen) == 3
    for seen, v in zip(service.experimental_local_results(service.run(step))[1], known, strict=True):
        assert seen == v.numpy().reshape(-1)[-1]


def test_the_difference_that_an_update_makes_can_be_seen(service: cs.CentralStorageStrategy) -> None:
    w = variables(service)[0]
    with service.scope():
        optimizer = cs.optimizers.SGD(1.0)

    def step() -> np.ndarray:
        old = np.asarray(w)
        applied(optimizer, w)
        new = np.asarray(w)
        return new - old

    for _ in range(2):
        for difference in service.experimental_local_results(service.run(step)):
            assert difference.tolist() == [2, 2, 2]


@pytest.mark.parametrize("waits", ["all_reduce", "all_gather", "create", "number", "first apply"])
def test_another_replica_that_reads_its_update_changes_nothing_here(
    service: cs.CentralStorageStrategy, waits: str
) -> None:
    known = variables(service)
    with service.scope():
        optimizer, other = cs.optimizers.SGD(1.0), cs.optimizers.SGD(1.0)
        scalar = cs.Variable(0.0, aggregation=cs.VariableAggregation.MEAN)

    def meet() -> None:
        if waits == "all_reduce":
            context().all_reduce("SUM", np.ones(2))
        elif waits == "all_gather":
            context().all_gather(np.ones(2), 0)
        elif waits == "create":
            cs.Variable(1.0)
        elif waits == "number":
            scalar.assign_add(1.0)
        else:
            applied(other, *known)

    def step() -> list[float]:
        reader = Reader(*known)
        applied(optimizer, *known)
        if context().replica_id_in_sync_group == 0:
            early = [float(np.asarray(v).reshape(-1)[-1]) for v in known]
        meet()
        reader.assert_kept()
        if context().replica_id_in_sync_group == 1:
            early = [float(np.asarray(v).reshape(-1)[-1]) for v in known]
        reader.assert_kept()
        return early

    for _ in range(2):
        service.run(step)
    results = service.experimental_local_results(service.run(step))
    if waits in ("all_reduce", "all_gather", "create"):
        assert results[0] == results[1]


def test_writes_that_others_note_change_nothing_here(service: cs.CentralStorageStrategy) -> None:
    w = variables(service)[2]
    with service.scope():
        count = cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)

    def step() -> tuple[float, float]:
        reader = Reader(w)
        if context().replica_id_in_sync_group == 0:
            w.scatter_add(cs.IndexedSlices(np.ones((1, 100), F32), np.array([7])))
        count.assign_add(np.ones(2))
        context().all_reduce("SUM", np.ones(2))
        if context().replica_id_in_sync_group == 0:
            assert count[0] >= 2
        context().all_reduce("SUM", np.ones(2))
        reader.assert_kept()
        return float(reader.seen[0][7, 0]), float(w[7, 0])

    for k in range(3):
        assert set(service.experimental_local_results(service.run(step))) == {(3.0 + k, 4.0 + k)}


def test_a_write_that_is_noted_changes_nothing_that_was_shown_with_one_before(
    service: cs.CentralStorageStrategy,
) -> None:
    w = variables(service)[1]
    ordinary = cs.Variable(np.zeros(3, F32))

    def step() -> None:
        readers = []
        for _ in range(3):
            w.scatter_add(cs.IndexedSlices(np.ones((1, 5), F32), np.array([2])))
            ordinary.assign_add(np.ones(3, F32))
            readers.append(Reader(w, ordinary))
        for reader in readers:
            reader.assert_kept()
        assert readers[2].seen[0][2, 0] == readers[0].seen[0][2, 0] + 2

    service.run(step)


def test_what_is_kept_is_let_go(service: cs.CentralStorageStrategy) -> None:
    """Many updates in one run, with one earlier value at hand each time."""
    w = variables(service)[2]
    with service.scope():
        optimizer = cs.optimizers.SGD(1.0)

    def step() -> float:
        for k in range(20):
            value = np.asarray(w)
            assert value[0, 0] == 3 + 2 * k
            applied(optimizer, w)
        w.assign_sub(np.full(w.shape, 20, F32))
        return float(w[0, 0])

    assert service.experimental_local_results(service.run(step)) == (3.0, 3.0)


def test_copies_are_the_readers_for_good(service: cs.CentralStorageStrategy) -> None:
    w = variables(service)[0]

    def step() -> None:
        copies = [w.value(), w.read_value(), w.numpy(), w.sparse_read([0, 1]), np.array(w)]
        seen = [copy.copy() for copy in copies]
        w.assign_add(np.ones(3, F32))
        assert w[0] == seen[0][0] + 2
        for copy, before in zip(copies, seen, strict=True):
            assert (copy == before).all()
            assert copy.flags.writeable

    service.run(step)


def test_what_a_failed_step_held_is_freed_with_it(two: cs.CentralStorageStrategy) -> None:
    """A script may catch the error and go on with smaller batches."""

    def fail() -> None:
        gc.disable()
        held = np.zeros(1000)
        gc.of_the_failed = weakref.ref(held)  # type: ignore[attr-defined]
        raise MemoryError("no more")

    def is_freed() -> bool:
        reference = vars(gc).pop("of_the_failed")
        gc.enable()
        return reference() is None

    with pytest.raises(MemoryError, match="no more"):
        two.run(fail)
    assert all(two.experimental_local_results(two.run(is_freed)))
