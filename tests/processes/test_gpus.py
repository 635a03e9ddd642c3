"""Replicas on GPUs with the variables on a CPU: the whole service, over stand-ins for the GPUs."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.harness.digits import quick_digits
from tests.harness.processes import run
from tests.harness.services import connected
from tests.harness.stand_in_gpus import StandInGpus, stand_in_gpus
from tests.harness.training import linear

import central_storage as cs
from central_storage import errors
from central_storage.diagnostics.remedies import CUPY_ARRAYS

F32 = np.float32


@pytest.fixture(scope="module")
def gpus() -> Iterator[StandInGpus]:
    with stand_in_gpus(4, nbytes=4 << 20) as gpus:
        yield gpus


@pytest.fixture(scope="module")
def two(gpus: StandInGpus) -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["gpu:0", "gpu:1"]) as strategy:
        yield connected(strategy)


@pytest.fixture(params=[pytest.param(False, id="processes"), pytest.param(True, id="threads", marks=pytest.mark.slow)])
def either(gpus: StandInGpus, two: cs.CentralStorageStrategy, request: pytest.FixtureRequest) -> Iterator[Any]:
    if not request.param:
        yield two
        return
    with cs.CentralStorageStrategy(["gpu:0", "gpu:1"], in_process=True) as strategy:
        yield strategy


def counted() -> dict[str, int]:
    """What this replica's process has counted."""
    counts: dict[str, int] = cs.get_array_module().counts()  # type: ignore[attr-defined]
    return counts


def test_training_gives_what_it_gives_on_cpus(either: cs.CentralStorageStrategy) -> None:
    def train(strategy: cs.CentralStorageStrategy) -> tuple[np.ndarray, np.ndarray, list[float]]:
        with strategy.scope():
            w, b = cs.Variable(np.eye(4, 3, dtype=F32)), cs.Variable(np.zeros(3, F32))
            optimizer = cs.optimizers.Adam(0.1)

        def step(x: Any, into_buffers: bool) -> float:
            of_w, of_b, loss = linear(x, w, b, into_buffers=into_buffers)
            optimizer.apply_gradients([(of_w, w), (of_b, b)])
            return loss

        losses = []
        for number in range(4):
            x = np.random.default_rng(number).normal(size=(2, 5, 4)).astype(F32)
            values = strategy.run(step, args=(cs.PerReplica(list(x)), number % 2 == 0))
            losses.append(float(strategy.reduce("SUM", values, axis=None)))
        return w.numpy(), b.numpy(), losses

    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as on_cpus:
        expected = train(on_cpus)
    for ours, theirs in zip(train(either), expected, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the kernels of a stand-in are compiled by gcc")
def test_variables_on_the_same_gpu_are_read_there_and_keep_their_bits(capfd: pytest.CaptureFixture[str]) -> None:
    with stand_in_gpus(2), cs.CentralStorageStrategy(["gpu:0", "gpu:1"], "gpu:0") as strategy:
        with strategy.scope():
            w, count = cs.Variable(np.ones((50, 10), F32)), cs.Variable(0, aggregation=cs.VariableAggregation.SUM)
            optimizer = cs.optimizers.SGD(1.0)

        def step() -> tuple[float, float, float, int, int]:
            xp = cs.get_array_module()
            kept, held = w[...], xp.asarray(w)
            seen, rows = float((w + 0).sum()), float(cs.nn.embedding_lookup(w, xp.asarray([3, 3])).sum())
            optimizer.apply_gradients([(xp.full(w.shape, F32(-1)), w)])
            count.assign_add(np.int32(1))
            after = float(xp.asarray(w).sum())
            assert float(kept.sum()) == float(held.sum()) == seen
            counts = counted()
            return seen, rows, after, counts["opened"], counts["host_to_device_nbytes"]

        first, second, third = (strategy.experimental_local_results(strategy.run(step)) for _ in range(3))
        assert [values[:3] for values in (*first, *second)] == [(500, 20, 1500)] * 2 + [(1500, 60, 2500)] * 2
        assert (w.numpy()[0, 0], int(count)) == (7, 6)
        assert [values[3] for values in third] == [2, 0]  # the variables and the gradients
        copied = [values[4] - before[4] for values, before in zip(third, second, strict=True)]
        assert copied[0] < 100  # row numbers
        assert copied[1] > 2000
    printed = capfd.readouterr().err
    assert printed.count("transport CUDA IPC: variables on gpu:0 are copied there, rows read where they lie") == 1
    assert printed.count("transport staging: variables are on another GPU") == 1


def test_operators_take_variables_and_functions_of_cupy_do_not(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w, v = (cs.Variable(np.array(rows, np.float32)) for rows in ([[1, 2], [3, 4]], [[2, 0], [1, 1]]))
    a, b, x = w.numpy(), v.numpy(), np.array([[1, 1], [0, 2]], np.float32)

    def step() -> list[Any]:
        xp = cs.get_array_module()
        here = xp.asarray(x)
        found = [here @ w, w @ here, w @ v, here + w, w - here, here / w, w**here, here < w, w >= here, [1, 2] * w]
        return [each.get() for each in found]

    expected = [x @ a, a @ x, a @ b, x + a, a - x, x / a, a**x, x < a, a >= x, np.array([1, 2], np.float32) * a]
    for ours, theirs in zip(two.experimental_local_results(two.run(step))[1], expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    with pytest.raises(TypeError) as refused:
        two.run(lambda: cs.get_array_module().matmul(w, w))
    assert CUPY_ARRAYS in "".join(traceback.format_exception(refused.value))


def test_only_what_has_changed_is_copied(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        changing, constant = cs.Variable(np.zeros(1000, F32)), cs.Variable(np.ones(100_000, F32))
        optimizer = cs.optimizers.SGD(1.0)

    def step() -> np.int64:
        xp = cs.get_array_module()
        total = xp.asarray(changing).sum() + xp.asarray(constant).sum() + (constant + changing[0]).sum()
        assert float(total) > 0
        optimizer.apply_gradients([(xp.full(1000, F32(-1)), changing)])
        return np.int64(counted()["host_to_device_nbytes"])  # an int that is the same everywhere comes back once

    seen = np.array([two.experimental_local_results(two.run(step)) for _ in range(4)])
    assert set(np.diff(seen, axis=0).ravel().tolist()) == {4000}
    assert changing.numpy()[0] == 8


def test_what_was_read_keeps_its_bits(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.zeros(1000, F32), aggregation=cs.VariableAggregation.SUM)
        optimizer = cs.optimizers.SGD(1.0)

    def step() -> list[float]:
        xp = cs.get_array_module()
        read = [np.asarray(w), w[1:], xp.asarray(w), xp.from_dlpack(w.current())]
        seen = [float(array.sum()) for array in read]
        for _ in range(3):
            optimizer.apply_gradients([(xp.full(1000, F32(-1)), w)])
            read.append(xp.asarray(w))  # which holds the variable and not its memory
            seen.append(float(read[-1].sum()))
        w.scatter_add(cs.IndexedSlices(xp.ones(1, F32), xp.asarray([3])))
        read += [xp.asarray(w), w[...]]
        seen += [seen[-1] + 1] * 2
        w.scatter_add(cs.IndexedSlices(xp.ones(1, F32), xp.asarray([3])))
        assert float(w[3]) - float(read[-1][3]) == 1
        context = cs.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == 0:
            w.assign(np.full(1000, 9, F32))
            assert w[0] == 18
        else:
            w.assign(np.full(1000, 9, F32))
        context.all_reduce("SUM", xp.ones(2))
        assert [float(array.sum()) for array in read] == seen
        return seen[:1] + seen[4:7]

    for first in (0, 18_000):
        found = two.experimental_local_results(two.run(step))
        assert found == ([first, first + 2000, first + 4000, first + 6000],) * 2


def test_copies_that_are_asked_for_are_the_users(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        v = cs.Variable([1.0, 2.0])

    def change_a_copy() -> list[float]:
        mine = v.value()
        mine *= 10
        return list(map(float, np.asarray(v))) + mine.tolist()

    for _ in range(2):
        results = two.experimental_local_results(two.run(change_a_copy))
        assert results == ([1, 2, 10, 20],) * 2


def test_rows_of_a_table_larger_than_the_gpu(two: cs.CentralStorageStrategy) -> None:
    table_nbytes = 8 << 20
    with two.scope():
        table = cs.Variable(np.zeros((table_nbytes // 64, 16), F32), sparse=True)
        optimizer = cs.optimizers.SGD(1.0)

    def step(ids: Any) -> tuple[float, int]:
        xp = cs.get_array_module()
        rows = cs.nn.embedding_lookup(table, ids)
        assert type(rows) is xp.ndarray
        assert type(ids) is xp.ndarray
        gradient = cs.IndexedSlices(xp.full(rows.shape, F32(-1)), ids, table.shape)
        optimizer.apply_gradients([(gradient, table)])
        return float(rows.sum()), counted()["host_to_device_nbytes"]

    ids = np.array([5, 70_000, 5])
    first = two.experimental_local_results(two.run(step, args=(ids,)))
    again = two.experimental_local_results(two.run(step, args=(ids,)))
    assert [total for total, _ in first] == [0, 0]
    assert [total for total, _ in again] == [(4 + 2 + 4) * 16] * 2
    assert all(nbytes - before < 1000 for (_, nbytes), (_, before) in zip(again, first, strict=True))
    assert two.run(lambda: counted()["page_locked_nbytes"] >= table_nbytes) is True

    with pytest.raises(
        errors.DeviceMemoryError, match=r"gpu:[01]: 8388608 bytes are needed for variable .*free"
    ) as refused:
        two.run(lambda: float(cs.get_array_module().asarray(table).sum()))
    assert isinstance(refused.value, MemoryError)
    assert "embedding_lookup" in str(refused.value)


def test_a_table_larger_than_the_gpu_trains_as_on_cpus(two: cs.CentralStorageStrategy) -> None:
    height, width = 1 << 17, 16  # 8 MiB; a GPU has 4

    def train(strategy: cs.CentralStorageStrategy) -> tuple[Any, np.ndarray, np.ndarray]:
        with strategy.scope():
            table = cs.Variable(np.ones((height, width), F32), sparse=True)
            optimizer = cs.optimizers.RowwiseAdagrad(0.5)

        def step(ids: Any) -> float:
            rows = cs.nn.embedding_lookup(table, ids)
            optimizer.apply_gradients([(cs.IndexedSlices(rows * rows, ids), table)])
            return float(rows.sum())

        losses = []
        for number in range(4):
            ids = np.random.default_rng(number).integers(0, height, (2, 50))
            values = strategy.run(step, args=(cs.PerReplica(list(ids // 1000 * 1000)),))
            losses.append(strategy.experimental_local_results(values))
        return losses, table.numpy(), optimizer.get_slot(table, "sum").numpy()

    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as on_cpus:
        expected = train(on_cpus)
    for ours, theirs in zip(train(two), expected, strict=True):
        assert np.array_equal(ours, theirs)
    assert len(np.unique(expected[1])) > 3


def test_replicas_see_what_they_wrote_and_what_others_did(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        total = cs.Variable(0.0, aggregation=cs.VariableAggregation.SUM)
        rows = cs.Variable(np.zeros((3, 2), F32))

    def step() -> tuple[float, list[Any], list[Any], float]:
        replica = cs.get_replica_context().replica_id_in_sync_group  # type: ignore[union-attr]
        xp = cs.get_array_module()
        total.assign_add(F32(replica + 1))
        rows.scatter_add(cs.IndexedSlices(xp.ones((1, 2), F32), xp.asarray([int(replica)])))
        own = xp.asarray(rows).tolist(), rows.sparse_read([int(replica)]).tolist()
        after = float(xp.asarray(total))
        return after, *own, float(cs.get_replica_context().all_reduce("SUM", xp.asarray(total)))  # type: ignore[union-attr]

    first, second = two.experimental_local_results(two.run(step))
    assert (first[0], second[0], first[3]) == (3, 3, 6)
    assert first[1:3] == ([[1, 1], [0, 0], [0, 0]], [[1, 1]])
    assert second[1:3] == ([[0, 0], [1, 1], [0, 0]], [[1, 1]])
    assert rows.numpy().tolist() == [[1, 1], [1, 1], [0, 0]]


def test_the_names_of_devices(two: cs.CentralStorageStrategy) -> None:
    names = [f"/job:localhost/replica:0/task:0/device:{name}" for name in ("GPU:0", "GPU:1", "CPU:0")]
    assert list(two.extended.worker_devices) == names[:2]
    assert list(two.extended.parameter_devices) == names[2:]
    seen = two.run(lambda: cs.get_replica_context().devices)  # type: ignore[union-attr]
    assert two.experimental_local_results(seen) == ((names[0],), (names[1],))


@pytest.mark.slow
def test_the_demonstration_learns_the_same_on_gpus(gpus: StandInGpus, tmp_path: Path) -> None:
    digits = quick_digits(tmp_path)

    def said(devices: str) -> list[str]:
        lines = run(digits, "--epochs", "2", "--devices", devices).ok().lines
        return [line for line in lines if line.startswith(("epoch", "test accuracy"))]

    on_gpus = said("gpu:0,gpu:1")
    assert on_gpus == said("cpu:0,cpu:1") != []


def test_a_context_only_where_one_is_needed(gpus: StandInGpus, two: cs.CentralStorageStrategy) -> None:
    servers, workers = [], []
    for process in psutil.Process(two.statistics().pid).parent().children():
        command = " ".join(process.cmdline())
        if "cs_server" in command:
            servers.append(gpus.counts(process.pid))
        elif "cs_worker" in command:
            workers.append(gpus.counts(process.pid))
    assert servers == [None]  # it never imported CuPy
    assert sorted(counts["contexts"] for counts in workers if counts is not None) == [0b01, 0b10]


def test_variables_that_are_freed_leave_their_memory_to_others(two: cs.CentralStorageStrategy) -> None:
    def read(v: cs.Variable) -> float:
        return float(cs.get_array_module().asarray(v).sum())

    for value in (1.0, 2.0, 3.0):
        with two.scope():
            v = cs.Variable(np.full(10_000, value, F32))
        assert two.reduce("SUM", two.run(read, args=(v,)), axis=None) == 2 * 10_000 * value
        del v


def test_replicas_with_several_devices(gpus: StandInGpus) -> None:
    with cs.CentralStorageStrategy([("gpu:0", "gpu:1"), ("gpu:2", "gpu:3")], "cpu:0") as strategy:
        with strategy.scope():
            v = cs.Variable(np.zeros(6, F32))
            optimizer = cs.optimizers.SGD(1.0)

        def step() -> tuple[list[int], list[float], int]:
            context = cs.get_replica_context()
            assert context is not None
            with cs.device(context.devices[1]):
                here = cs.convert_to_tensor(np.arange(6, dtype=F32))
            xp = cs.get_array_module()
            with xp.cuda.Device(1):
                gradient = here * F32(-1)
            optimizer.apply_gradients([(gradient, v)])
            split = strategy.experimental_split_to_logical_devices(xp.arange(6, dtype=F32), [2])
            devices = [here.device.id, *(piece.value.device.id for piece in split.pieces)]
            return devices, xp.asarray(split.read()).tolist(), counted()["contexts"]

        first, second = strategy.experimental_local_results(strategy.run(step))
        assert first[:2] == second[:2] == ([1, 0, 1], [0, 1, 2, 3, 4, 5])
        assert v.numpy().tolist() == [0, 2, 4, 6, 8, 10]
        assert first[2] | second[2] == 0b1111


@pytest.mark.slow
def test_random_numbers_are_a_function_of_run_and_replica(gpus: StandInGpus) -> None:
    def draw(in_process: bool) -> list[Any]:
        def nested(strategy: cs.CentralStorageStrategy) -> Any:
            return strategy.run(lambda: float(cs.get_array_module().random.normal()))

        def step() -> tuple[float, float]:
            random = cs.get_array_module().random
            first = float(random.normal())
            cs.get_replica_context().merge_call(nested)  # type: ignore[union-attr]
            return first, float(random.normal())

        with cs.CentralStorageStrategy(["gpu:0", "gpu:0"], "cpu:0", seed=5, in_process=in_process) as strategy:
            return [strategy.experimental_local_results(strategy.run(step)) for _ in range(2)]

    drawn = draw(False)
    assert len({number for pairs in drawn for pair in pairs for number in pair}) == 8
    assert draw(True) == drawn
