"""Sparse variables over a service: tables that are trained by gradients of rows, and have no gradient buffers."""

from __future__ import annotations

import copy
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from central_storage.errors import InvalidArgumentError

F32 = np.float32


def table_of(strategy: cs.CentralStorageStrategy, height: int = 8, **options: Any) -> cs.Variable:
    with strategy.scope():
        return cs.Variable(np.arange(2 * height, dtype=F32).reshape(height, 2), sparse=True, **options)


def memory(strategy: cs.CentralStorageStrategy, kind: str) -> dict[str, int]:
    """Bytes that the server has of each segment of that kind: those that are there."""
    smaps = Path(f"/proc/{strategy.statistics().pid}/smaps").read_text()
    found = re.findall(rf"memfd:cs-\w+-({kind}/\S*).*\n(?:.*\n)*?Rss: +(\d+) kB", smaps)
    return {name: 1024 * int(resident) for name, resident in found}


def test_a_table_is_trained_by_rows_and_has_no_gradient_buffers(own: cs.CentralStorageStrategy) -> None:
    with own.scope():
        table = cs.Variable(np.zeros((1 << 20, 64), F32), name="table", sparse=True)  # 256 MiB
        bias = cs.Variable(np.zeros(64, F32), name="bias")
        optimizer = cs.optimizers.SGD(1.0, momentum=0.5)
    assert (table.sparse, table.trainable, bias.sparse) == (True, True, False)

    def step() -> None:
        rows = np.array([7, 1 << 19, 7])
        ones = np.ones_like(cs.nn.embedding_lookup(table, rows))
        optimizer.apply_gradients([(cs.IndexedSlices(ones, rows, table.shape), table), (np.ones(64, F32), bias)])

    for _ in range(2):
        own.run(step)
    assert table.sparse_read([7, 1 << 19, 8])[:, 0].tolist() == [-4 - 6, -2 - 3, 0]
    assert not any("sparse" in name for name in memory(own, "gradients"))
    assert 0 < memory(own, "parameters")["parameters/sparse/float32"] <= 1 << 18
    assert 0 < memory(own, "slots")["slots/1/momentum/sparse/float32"] <= 1 << 18
    os.kill(own.statistics().pid, signal.SIGKILL)
    own.run(step)
    assert table.sparse_read([7, 8])[:, 0].tolist() == [-4 - 6 - 7, 0]


def test_a_dense_gradient_and_buffers_are_refused_by_name(two: cs.CentralStorageStrategy) -> None:
    table = table_of(two, name="refusing")
    with two.scope():
        sgd = cs.optimizers.SGD(1.0)

    def dense() -> None:
        sgd.apply_gradients([(np.ones((8, 2), F32), table)])

    def buffers() -> None:
        cs.gradient_buffers([table])

    def rows() -> None:
        sgd.apply_gradients([(cs.IndexedSlices(np.ones((1, 2), F32), np.array([3])), table)])

    for refused in (dense, buffers):
        with pytest.raises(InvalidArgumentError, match=r"refusing was made with sparse=True.*IndexedSlices"):
            two.run(refused)
    before = table.numpy()
    two.run(rows)
    assert (before - table.numpy())[:, 0].tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
    assert int(sgd.iterations) == 1


def test_all_ways_to_read_and_write_one(two: cs.CentralStorageStrategy) -> None:
    table = table_of(two, aggregation=cs.VariableAggregation.MEAN)
    rows = cs.IndexedSlices(np.full((1, 2), 10, F32), np.array([1]))
    table.scatter_update(rows).scatter_add(rows)
    assert table.numpy()[:2].tolist() == [[0, 1], [20, 20]]
    assert table.sparse_read([[1]]).tolist() == [[[20, 20]]]

    def step() -> Any:
        table.assign_add(np.ones((8, 2), F32))
        return np.asarray(table)[0].copy(), cs.nn.embedding_lookup(table, [1])

    for whole, row in two.experimental_local_results(two.run(step)):
        assert (whole.tolist(), row.tolist()) == ([1, 2], [[21, 21]])
    other = copy.deepcopy(table)
    assert (other.sparse, other.numpy().tolist()) == (True, table.numpy().tolist())
    assert two.run(lambda given: given.sparse and given is table, (table,)) is True
    local = cs.Variable(np.ones((3, 2), F32), sparse=True)
    assert two.experimental_local_results(two.run(lambda: (local.sparse, local.sparse_read([2]).sum())))[0] == (True, 2)


def test_the_numbers_of_rows_are_all_that_row_wise_adagrad_keeps(own: cs.CentralStorageStrategy) -> None:
    height, width = 1 << 18, 64  # 64 MiB, and as much for the slot of Adagrad
    with own.scope():
        table = cs.Variable(np.zeros((height, width), F32), name="table", sparse=True)
        optimizer = cs.optimizers.RowwiseAdagrad(0.5, initial_accumulator_value=1.0)

    def step() -> None:
        rows = np.array([5, 5, height - 1])
        optimizer.apply_gradients([(cs.IndexedSlices(np.ones((3, width), F32), rows), table)])

    def expected(steps: int) -> tuple[float, float]:
        """The first element and the number of row 5, which both replicas name twice."""
        value, number = F32(0), F32(1)
        for _ in range(steps):
            number += F32(16)
            value -= F32(0.5) / (np.sqrt(number) + F32(1e-10)) * F32(4)
        return float(value), float(number)

    slot = optimizer.get_slot(table, "sum")
    assert (slot.shape, slot.numpy().tolist()[:2]) == ((height,), [1, 1])
    for _ in range(2):
        own.run(step)
    assert (float(table.sparse_read(5)[0]), float(slot.numpy()[5])) == expected(2)
    assert set(np.flatnonzero(slot.numpy() != 1)) == {5, height - 1}
    assert memory(own, "slots") == {"slots/1/sum/sparse/float32": 4 * height}
    assert own.statistics().slot_nbytes == 4 * height
    os.kill(own.statistics().pid, signal.SIGKILL)
    own.run(step)
    assert (float(table.sparse_read(5)[0]), float(slot.numpy()[5])) == expected(3)
    with pytest.raises(InvalidArgumentError, match=r"slot table/sum is float32\[262144\]"):
        slot.assign(np.zeros((height, width), F32))
    slot.assign(np.zeros(height, F32))
    assert not slot.numpy().any()


def test_a_checkpoint_keeps_the_numbers_of_rows(two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    def made() -> tuple[cs.Variable, cs.optimizers.Optimizer, cs.train.Checkpoint]:
        with two.scope():
            table = cs.Variable(np.ones((6, 2), F32), sparse=True)
            optimizer = cs.optimizers.RowwiseAdagrad(0.5)
        return table, optimizer, cs.train.Checkpoint(table=table, optimizer=optimizer)

    def step(table: Any, optimizer: Any) -> None:
        optimizer.apply_gradients([(cs.IndexedSlices(np.ones((1, 2), F32), np.array([4])), table)])

    first, second = made(), made()
    two.run(step, first[:2])
    second[2].restore(first[2].save(tmp_path / "rows"))
    for table, optimizer, _ in (first, second):
        two.run(step, (table, optimizer))
        assert optimizer.get_slot(table, "sum").numpy().tolist() == [0, 0, 0, 0, 8, 0]
        assert [weight.shape for weight in optimizer.get_weights()] == [(), (6,)]
    assert first[0].numpy().tolist() == second[0].numpy().tolist()


def test_a_checkpoint_goes_into_a_dense_variable_and_back(two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    class Model:
        def __init__(self, *, sparse: bool) -> None:
            with two.scope():
                self.table = cs.Variable(np.zeros((6, 2), F32), name="embedding", sparse=sparse)
                self.optimizer = cs.optimizers.Adagrad(1.0, initial_accumulator_value=0.0)

        def step(self) -> None:
            gradient = cs.IndexedSlices(np.ones((2, 2), F32), np.array([1, 4]))
            self.optimizer.apply_gradients([(gradient, self.table)])

        def facts(self) -> tuple[Any, ...]:
            slot = self.optimizer.get_slot(self.table, "accumulator").numpy()
            return self.table.numpy().tolist(), slot.tolist(), int(self.optimizer.iterations)

    first = Model(sparse=True)
    two.run(first.step)
    path = cs.train.Checkpoint(model=first).save(tmp_path / "sparse")
    second = Model(sparse=False)
    cs.train.Checkpoint(model=second).restore(path)
    assert second.facts() == first.facts()
    two.run(second.step)
    path = cs.train.Checkpoint(model=second).save(tmp_path / "dense")
    cs.train.Checkpoint(model=first).restore(path)
    assert first.facts() == second.facts() != ()
