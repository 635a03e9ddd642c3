"""The whole service on a real GPU: the same numbers, contexts only where they belong, memory that comes back."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import numpy as np
import psutil
import pytest
from tests.harness.processes import run
from tests.harness.timing import unit
from tests.processes.test_gpu_variables import train

import central_storage as cs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(unit(300))]

F32 = np.float32


@pytest.mark.parametrize("bound", [{}, {"global_clipnorm": 1.0}])
def test_variables_on_a_gpu_train_as_on_a_cpu(bound: dict[str, float]) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0") as on_cpu:
        expected = train(on_cpu, **bound)
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "gpu:0") as on_gpu:
        found = train(on_gpu, **bound)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5 if bound else 0)


def step_on(w: cs.Variable, optimizer: cs.optimizers.Optimizer) -> float:
    xp = cs.get_array_module()
    optimizer.apply_gradients([(xp.asarray(w) * F32(0.5) - F32(1), w)])
    return float(xp.asarray(w).sum())


@pytest.mark.parametrize("owner", ["cpu:0", "gpu:0"])
def test_two_workers_on_one_gpu(owner: str) -> None:
    expected = np.zeros(1000, F32)
    with cs.CentralStorageStrategy(["gpu:0", "gpu:0"], owner) as strategy:
        with strategy.scope():
            w, optimizer = cs.Variable(np.zeros(1000, F32)), cs.optimizers.SGD(0.25)
        for _ in range(5):
            strategy.run(step_on, args=(w, optimizer))
            gradient = expected * F32(0.5) - F32(1)
            expected = expected - F32(0.25) * (gradient + gradient)
        assert np.array_equal(w.numpy(), expected)


def uses_cuda(process: psutil.Process) -> bool:
    """Whether a process has one of the driver's device files open, as every context has."""
    directory = f"/proc/{process.pid}/fd"
    return any("/dev/nvidia" in os.readlink(f"{directory}/{name}") for name in os.listdir(directory))


@pytest.mark.parametrize(
    ("device", "owner", "using"), [("gpu:0", "cpu:0", {"cs_worker"}), ("cpu:0", "gpu:0", {"cs_server"})]
)
def test_a_context_only_where_one_belongs(device: str, owner: str, using: set[str]) -> None:
    with cs.CentralStorageStrategy([device, device], owner) as strategy:
        with strategy.scope():
            w, optimizer = cs.Variable(np.zeros(10, F32)), cs.optimizers.SGD(0.25)
        strategy.run(step_on, args=(w, optimizer))
        found = set()
        for process in psutil.Process().children(recursive=True):
            if uses_cuda(process):
                found.add(next((name for name in ("cs_server", "cs_worker") if name in process.cmdline()), "other"))
    assert found == using


def test_the_memory_of_a_killed_worker_is_free_within_five_seconds() -> None:
    import cupy

    nbytes = 1 << 30

    def hold() -> int:
        xp: Any = cs.get_array_module()
        globals()["_held"] = xp.zeros(nbytes, xp.uint8)
        xp.cuda.Device().synchronize()
        return os.getpid()

    with cs.CentralStorageStrategy(["gpu:0"], "cpu:0", max_restarts=0) as strategy:
        before = cupy.cuda.runtime.memGetInfo()[0]
        pid = strategy.run(hold)
        assert cupy.cuda.runtime.memGetInfo()[0] <= before - nbytes
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while cupy.cuda.runtime.memGetInfo()[0] < before and time.monotonic() < deadline:
            time.sleep(0.05)  # only the driver knows when it is done
        assert cupy.cuda.runtime.memGetInfo()[0] >= before


@pytest.mark.parametrize("owner", ["cpu:0", "gpu:0"])
def test_digits_to_the_same_accuracy(owner: str) -> None:
    launch = ("cs-launch", "--devices", "gpu:0", "--parameter-device", owner)
    ended = run(*launch, "examples/digits.py", timeout=unit(200)).ok()
    found = re.search(r"test accuracy (\d\.\d{4})$", ended.out, re.MULTILINE)
    assert found is not None
    assert float(found[1]) >= 0.97


def test_the_embedding_to_the_same_loss() -> None:
    def losses(device: str) -> list[float]:
        ended = run("examples/embedding.py", device, timeout=unit(200)).ok()
        return [float(text) for text in re.findall(r"loss (\d+\.\d+)", ended.out)]

    on_gpu, on_cpu = losses("gpu:0"), losses("cpu:0")
    assert len(on_gpu) == len(on_cpu) > 0
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-2)


def test_torch_on_cuda_takes_parameters_without_a_copy() -> None:
    pytest.importorskip("torch")

    def look(w: cs.Variable) -> tuple[bool, float]:
        import torch

        taken = torch.as_tensor(w, device="cuda")
        return taken.data_ptr() == cs.get_array_module().asarray(w).data.ptr, float(taken.sum())

    with cs.CentralStorageStrategy(["gpu:0"], "gpu:0") as strategy:
        with strategy.scope():
            w = cs.Variable(np.ones(1000, F32))
        assert strategy.run(look, args=(w,)) == (True, 1000.0)
