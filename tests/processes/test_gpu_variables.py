"""Variables on a GPU: the whole service, over stand-ins for GPUs."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.harness.cupy_stand_in.c_kernels import COMPILER
from tests.harness.services import connected
from tests.harness.stand_in_gpus import StandInGpus, stand_in_gpus
from tests.harness.training import linear

import central_storage as cs
from central_storage import errors
from central_storage.checkpoint import disk

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no gcc here to run kernels without a GPU")

F32 = np.float32


@pytest.fixture(scope="module")
def gpus() -> Iterator[StandInGpus]:
    with stand_in_gpus(2, nbytes=64 << 20) as gpus:  # of which 48 MiB are the server's from the start
        yield gpus


@pytest.fixture(scope="module")
def two(gpus: StandInGpus) -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "gpu:1") as strategy:
        yield connected(strategy)


def check_checkpoints(strategy: cs.CentralStorageStrategy, directory: Path) -> None:
    """Save many variables and their slots, at once and in a thread, and restore both. On a GPU each array has memory of
    its own, and a save brings it to the machine's memory."""
    random = np.random.default_rng(5)
    with strategy.scope():
        made = [cs.Variable(random.standard_normal(100 + n).astype(F32)) for n in range(50)]
        count, adam = cs.Variable(np.zeros(3, np.int64)), cs.optimizers.Adam(0.1)

    def step(factor: Any) -> None:
        adam.apply_gradients([(np.full(v.shape, factor, F32), v) for v in made])

    def bits() -> list[bytes]:
        slots = [np.asarray(adam.get_slot(v, slot)) for v in made for slot in ("m", "v")]
        return [value.tobytes() for value in (*(v.numpy() for v in [*made, count]), *slots)]

    checkpoint = cs.train.Checkpoint(made=made, count=count, adam=adam)
    saved = []
    for number, options in enumerate((None, cs.train.CheckpointOptions(enable_async=True)), 1):
        strategy.run(step, args=(number,))
        count.assign([number] * 3)
        saved.append((checkpoint.save(directory / "ckpt", options=options), bits()))
    assert saved[0][1] != saved[1][1]
    for path, expected in saved:
        checkpoint.restore(path).assert_consumed()
        assert bits() == expected


@pytest.mark.parametrize("part", [disk.PART, 300])
def test_checkpoints_have_the_same_bits(
    two: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(disk, "PART", part)
    check_checkpoints(two, tmp_path)


def train(strategy: cs.CentralStorageStrategy, kind: str = "Adam", **optimizer_arguments: Any) -> list[np.ndarray]:
    """A dense variable, a table, and a count; what they and a slot are in the end."""
    with strategy.scope():
        w = cs.Variable(np.linspace(-1, 1, 300, dtype=F32).reshape(30, 10), name="w")
        table = cs.Variable(np.ones((50, 10), F32), name="table")
        count = cs.Variable(0, dtype="int64", aggregation=cs.VariableAggregation.SUM)
        optimizer = getattr(cs.optimizers, kind)(0.1, **optimizer_arguments)

    def step(x: Any, ids: Any) -> float:
        rows = cs.nn.embedding_lookup(table, ids)
        error = x @ w - rows
        optimizer.apply_gradients([(x.T @ error, w), (cs.IndexedSlices(-error, ids, table.shape), table)])
        count.assign_add(np.array(len(ids)))
        return float((error**2).sum())

    losses = []
    for number in range(4):
        random = np.random.default_rng(number)
        x = cs.PerReplica(list(random.normal(size=(2, 5, 30)).astype(F32)))
        ids = cs.PerReplica(list(random.integers(0, 50, (2, 5))))
        losses.append(strategy.reduce("SUM", strategy.run(step, args=(x, ids)), axis=None))
        w.assign_add(np.full((30, 10), 0.5, F32))
    slot = optimizer.get_slot(table, "v")
    assert slot is not None
    return [w.numpy(), table.numpy(), count.numpy(), slot.numpy(), np.array(losses)]


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"clipnorm": 0.1}, marks=pytest.mark.slow),
        {"kind": "AdamW", "weight_decay": 0.5, "exclude_from_weight_decay": ["^w"]},
        pytest.param(
            {"kind": "AdamW", "weight_decay": 0.5, "exclude_from_weight_decay": ["table"], "amsgrad": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"kind": "LAMB", "weight_decay": 0.5, "exclude_from_weight_decay": ["^w"]}, marks=pytest.mark.slow
        ),
    ],
)
def test_training_gives_what_it_gives_on_a_cpu(two: cs.CentralStorageStrategy, given: dict[str, Any]) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0", in_process=True) as on_cpu:
        expected = train(on_cpu, **given)
    for ours, theirs in zip(train(two, **given), expected, strict=True):
        if "clipnorm" in given or given.get("kind") == "LAMB":  # a norm is added up in another order
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        else:
            np.testing.assert_array_equal(ours, theirs)


def test_one_context_and_that_is_the_servers(gpus: StandInGpus, two: cs.CentralStorageStrategy) -> None:
    found = {}
    for process in psutil.Process(two.statistics().pid).parent().children():
        command = process.cmdline()
        found[next((name for name in ("cs_server", "cs_worker") if name in command), "")] = gpus.counts(process.pid)
    assert found["cs_worker"] is None
    assert found["cs_server"] is not None
    assert found["cs_server"]["contexts"] == 0b10
    assert two.extended.parameter_devices == ("/job:localhost/replica:0/task:0/device:GPU:1",)


def test_a_checkpoint_and_an_observer_read_what_they_always_read(
    two: cs.CentralStorageStrategy, tmp_path: Path
) -> None:
    with two.scope():
        v = cs.Variable(np.arange(5, dtype=F32), name="observed")
    path = cs.train.Checkpoint(v=v).save(str(tmp_path / "checkpoint"))
    v.assign(np.zeros(5, F32))
    with cs.connect(two.address) as observer:
        assert observer.get("observed").tolist() == [0] * 5
    cs.train.Checkpoint(v=v).restore(path)
    assert v.numpy().tolist() == [0, 1, 2, 3, 4]


def test_what_does_not_fit_the_gpu_is_refused_before_anything_has_changed(two: cs.CentralStorageStrategy) -> None:
    with two.scope(), pytest.raises(errors.DeviceMemoryError, match=r"planned.* on gpu:1 for its value .* available"):
        cs.Variable(np.zeros(5 << 20, F32), name="large")
    with two.scope():
        v = cs.Variable(np.zeros(1 << 20, F32), name="fits")
        optimizer = cs.optimizers.Adam(1.0, amsgrad=True)
        small = cs.optimizers.SGD(1.0)

    def step(optimizer: cs.optimizers.Optimizer) -> None:
        optimizer.apply_gradients([(np.full(1 << 20, -1, F32), v)])

    with pytest.raises(MemoryError, match=r"optimizer .* planned.* on gpu:1 for the slots m, v, vhat of 1 variable"):
        two.run(step, args=(optimizer,))
    assert not v.numpy().any()
    two.run(step, args=(small,))
    assert v.numpy()[:2].tolist() == [2, 2]


def bytes_available() -> int:
    """Memory that the GPU of the scope's service has left."""
    with pytest.raises(errors.DeviceMemoryError) as full:
        cs.Variable(np.zeros(8 << 20))
    found = re.search(r"(\d+) bytes of it available", str(full.value))
    assert found is not None
    return int(found[1])


def test_an_optimizer_whose_kernel_does_not_fit_the_gpu_fails_and_all_else_goes_on(
    two: cs.CentralStorageStrategy,
) -> None:
    with two.scope():
        small, optimizer = cs.Variable(np.zeros(2)), cs.optimizers.SGD(0.5)
        rest = []
        while (available := bytes_available()) > 4096:  # what was set aside already is filled first
            rest.append(cs.Variable(np.zeros((available - 4096) // 8)))

    def step() -> None:
        optimizer.apply_gradients([(np.full(2, -1.0), small)])

    with pytest.raises(MemoryError, match=r"optimizer \d+ \(SGD\): the kernel sgd_float64 planned on gpu:1, \d+ bytes"):
        two.run(step)
    assert small.numpy().tolist() == [0, 0]
    del rest
    with two.scope():
        cs.Variable(0.0)  # the freed one goes with the next request
    two.run(step)
    assert small.numpy().tolist() == [1, 1]


def test_freed_variables_give_their_memory_back(gpus: StandInGpus, two: cs.CentralStorageStrategy) -> None:
    def allocated() -> int:
        counts = gpus.counts(two.statistics().pid)
        assert counts is not None
        return counts["allocated_nbytes"]

    for value in (1.0, 2.0, 3.0):
        with two.scope():
            v = cs.Variable(np.full(1 << 20, value, F32))
        before = allocated()
        assert v.numpy().sum() == value * (1 << 20)
        del v
        with two.scope():
            cs.Variable(0.0)  # the freed ones go with the next request
    assert allocated() <= before


@pytest.mark.parametrize("devices", [["gpu:0", "gpu:1"], ["gpu:1"]])
def test_replicas_on_gpus_too(gpus: StandInGpus, devices: list[str]) -> None:
    with cs.CentralStorageStrategy(devices, "gpu:0" if len(devices) > 1 else None, in_process=True) as strategy:
        assert strategy.extended.parameter_devices[0][-1] == ("0" if len(devices) > 1 else "1")
        with strategy.scope():
            w = cs.Variable(np.zeros(9, F32))
            optimizer = cs.optimizers.SGD(1.0)

        def step() -> float:
            xp = cs.get_array_module()
            optimizer.apply_gradients([(xp.full(9, F32(-1)) - xp.asarray(w), w)])
            return float(xp.asarray(w).sum())

        for _ in range(3):
            strategy.run(step)
        expected = 0.0
        for _ in range(3):
            expected += len(devices) * (1 + expected)
        assert w.numpy().tolist() == [expected] * 9


def train_on_buffers(strategy: cs.CentralStorageStrategy, death: str = "") -> tuple[list[np.ndarray], dict[str, int]]:
    """Weights after some steps, and what replica 0 has counted. ``death``: replica 1 dies once, and makes this file."""
    with strategy.scope():
        w, b = cs.Variable(np.eye(4, 3, dtype=F32)), cs.Variable(np.zeros(3, F32))
        whole = cs.Variable(np.zeros(3, "complex64"))
        optimizer = cs.optimizers.Adam(0.1)
        other = cs.optimizers.SGD(0.1)

    def step(x: Any, number: int) -> dict[str, int]:
        xp = cs.get_array_module()
        of_w, of_b, _ = linear(x, w, b, into_buffers=number % 2 == 1)
        optimizer.apply_gradients([(of_w, w), (of_b, b)])
        if number == 2:
            other.apply_gradients([(of_b.astype("complex64"), whole), (of_b, b)])
        context = cs.get_replica_context()
        assert context is not None
        context.all_reduce("SUM", np.ones(1))
        if number == 3 and death and context.replica_id_in_sync_group == 1 and not Path(death).exists():
            Path(death).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return xp.counts() if hasattr(xp, "counts") else {}

    for number in range(5):
        x = np.random.default_rng(number).normal(size=(2, 5, 4)).astype(F32)
        counted = strategy.run(step, args=(cs.PerReplica(list(x)), number))
    counts = strategy.experimental_local_results(counted)[0]
    return [w.numpy(), b.numpy(), whole.numpy()], counts


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as on_cpus:
        return train_on_buffers(on_cpus)[0]


def test_gradients_on_the_same_gpu_are_born_where_the_server_reads_them(
    gpus: StandInGpus, tmp_path: Path, expected: list[np.ndarray]
) -> None:
    """Nothing of them goes to the machine's memory, and a worker that dies brings the same again."""
    with cs.CentralStorageStrategy(["gpu:1", "gpu:1"], "gpu:1", server_recovery=False) as strategy:
        found, counts = train_on_buffers(strategy, str(tmp_path / "dead"))
    assert (tmp_path / "dead").exists()
    assert counts["opened"] > 0
    assert counts["device_to_host_nbytes"] < 1000
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours, theirs)


def test_gradients_on_the_same_gpu_of_variables_that_adjoin(gpus: StandInGpus) -> None:
    """Adjacent variables are one range of an update, and their gradient buffers are several."""
    with cs.CentralStorageStrategy(["gpu:1"], "gpu:1", server_recovery=False) as strategy:
        with strategy.scope():
            variables = [cs.Variable(np.zeros(size, F32)) for size in (16, 32, 5, 64, 16)]
            optimizer = cs.optimizers.SGD(1.0)

        def step() -> None:
            xp = cs.get_array_module()
            buffers = cs.gradient_buffers(variables)
            for number, buffer in enumerate(buffers, 1):
                xp.multiply(xp.ones(buffer.shape, F32), F32(-number), out=buffer)
            optimizer.apply_gradients(list(zip(buffers, variables, strict=True)))

        strategy.run(step)
        strategy.run(step)
        assert [v.numpy().tolist() for v in variables] == [
            [2.0 * number] * v.size for number, v in enumerate(variables, 1)
        ]


@pytest.mark.slow
def test_gradients_on_the_same_gpu_outlive_the_server(
    gpus: StandInGpus, monkeypatch: pytest.MonkeyPatch, expected: list[np.ndarray]
) -> None:
    """It is killed in the midst of a commit, and the one after it has nothing on the GPU."""
    monkeypatch.setenv("CS_FAILPOINTS", "server.commit=kill@9")
    with cs.CentralStorageStrategy(["gpu:1", "gpu:1"], "gpu:1") as strategy:
        before = strategy.statistics().pid
        found, _ = train_on_buffers(strategy)
        assert strategy.statistics().pid != before
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours, theirs)
