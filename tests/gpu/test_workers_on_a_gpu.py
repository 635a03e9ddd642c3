"""Workers on a real GPU: what the stand-in cannot show."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import run, start
from tests.harness.services import connected
from tests.harness.timing import unit

import central_storage as cs
from central_storage import errors
from central_storage.diagnostics.gpu_inventory import gpu_count
from central_storage.diagnostics.remedies import CUPY_ARRAYS
from cs_proto.messages import DevicePlace
from cs_worker.devices.device import Device, open_device

pytestmark = pytest.mark.gpu

F32 = np.float32
MIB = 1 << 20


@pytest.fixture(scope="module")
def pair() -> Iterator[cs.CentralStorageStrategy]:
    """Two workers on one GPU, the variables on a CPU."""
    with cs.CentralStorageStrategy(["gpu:0", "gpu:0"], "cpu:0") as strategy:
        yield connected(strategy)


# --- the device alone -----------------------------------------------------------------------------------------------


class Shared:
    """Variables in a file that is mapped twice: writable, as the server has it, and read-only, as a worker has it."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        nbytes = [int(np.prod(shape)) * 4 for shape in shapes]
        total = -(-sum(nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("variables")
        os.ftruncate(descriptor, total)
        self.memory = np.frombuffer(mmap.mmap(descriptor, total), F32)
        seen = np.frombuffer(mmap.mmap(descriptor, total, prot=mmap.PROT_READ), F32)
        os.close(descriptor)
        self.versions = [0] * (len(shapes) + 1)
        self._places = []
        self._views = []
        start = 0
        for shape, each in zip(shapes, nbytes, strict=True):
            place = slice(start // 4, (start + each) // 4)
            self._places.append(place)
            self._views.append(seen[place].reshape(shape))
            start += each

    def write(self, number: int, value: float) -> None:
        self.memory[self._places[number - 1]] = value
        self.versions[number] += 1

    def version(self, number: int) -> int:
        return self.versions[number]

    def view(self, number: int) -> np.ndarray:
        return self._views[number - 1]

    def name(self, number: int) -> str:
        return f"v{number}"

    def on_device(self, number: int) -> DevicePlace | None:
        return None


@pytest.fixture(params=["locked", "not locked"])
def device(request: pytest.FixtureRequest) -> Iterator[tuple[Device, bool]]:
    opened = open_device("gpu:0")
    yield opened, request.param == "locked"
    opened.close()


def test_what_is_read_is_what_was_written_last(device: tuple[Device, bool]) -> None:
    gpu, is_locked = device
    shared = Shared((1000, 1000), (333, 7), (2000, 500))
    if is_locked:
        gpu.lock([shared.view(number) for number in (1, 2, 3)])
    for step in range(50):
        gpu.begin_run(shared)
        for number in (1, 2, 3):
            view = gpu.view(number, shared)
            rows = gpu.rows(number, np.array([[0, 332], [5, 0]]), shared)
            assert float(view.min()) == float(view.max()) == shared.view(number)[0, 0]
            assert float(rows.min()) == float(rows.max()) == shared.view(number)[0, 0]
        for number in (1, 2, 3):  # the last copies are waited for by nobody else
            shared.write(number, step * 10 + number)
            gpu.begin_run(shared)
        gpu.settle()


def test_gradients_arrive_whole(device: tuple[Device, bool]) -> None:
    gpu, is_locked = device
    cp = gpu.array_module
    targets = [np.frombuffer(mmap.mmap(-1, 4 * MIB), F32).reshape(1024, 1024) for _ in range(4)]
    if is_locked:
        gpu.lock(targets)
    for step in range(20):
        mine = [cp.full((1024, 1024), F32(step + number)) for number in (0, 1)]
        ours = gpu.buffers(targets[2:])
        for number, buffer in enumerate(ours, 2):
            cp.multiply(cp.ones((1024, 1024), F32), F32(step + number), out=buffer)
        gpu.fetch(list(zip(ours, targets[2:], strict=True)), may_change=False)
        gpu.fetch(list(zip(mine, targets[:2], strict=True)), may_change=True)
        for array in mine:
            array *= -1
        del mine, ours
        cp.full((1024, 1024), F32(-7))  # into memory that was just given back
        gpu.settle()
        for number, target in enumerate(targets):
            assert target.min() == target.max() == step + number


# --- the service ----------------------------------------------------------------------------------------------------


def training(strategy: cs.CentralStorageStrategy, steps: int = 30) -> list[np.ndarray]:
    """The weights of a small network after some steps of Adam."""
    random = np.random.default_rng(1)
    with strategy.scope():
        w1 = cs.Variable(random.normal(0, 0.3, (16, 32)).astype(F32))
        w2 = cs.Variable(random.normal(0, 0.3, (32, 4)).astype(F32))
        optimizer = cs.optimizers.Adam(0.01)

    def step(x: Any, y: Any) -> None:
        xp = cs.get_array_module()
        hidden = xp.tanh(x @ w1)
        slope = 2 * (hidden @ w2 - y) / F32(len(x))
        of_w1, of_w2 = cs.gradient_buffers([w1, w2])
        xp.matmul(hidden.T, slope, out=of_w2)
        xp.matmul(x.T, (slope @ xp.asarray(w2).T) * (1 - hidden**2), out=of_w1)
        optimizer.apply_gradients([(of_w1, w1), (of_w2, w2)])

    for _ in range(steps):
        x, y = random.normal(size=(2, 64, 16)).astype(F32), random.normal(size=(2, 64, 4)).astype(F32)
        strategy.run(step, args=(cs.PerReplica(list(x)), cs.PerReplica(list(y))))
    return [w1.numpy(), w2.numpy()]


@pytest.mark.parametrize(("parameter_device", "recovers"), [("cpu:0", True), ("gpu:0", True), ("gpu:0", False)])
def test_two_workers_on_one_gpu_train_as_two_on_cpus(parameter_device: str, recovers: bool) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0") as strategy:
        expected = training(strategy)
    with cs.CentralStorageStrategy(["gpu:0", "gpu:0"], parameter_device, server_recovery=recovers) as strategy:
        found = training(strategy)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("parameter_device", ["cpu:0", "gpu:0"])
def test_operators_take_variables(parameter_device: str) -> None:
    """CuPy's own ``array @ variable`` takes arrays of CuPy alone."""
    with cs.CentralStorageStrategy(["gpu:0"], parameter_device) as strategy:
        with strategy.scope():
            w, v = (cs.Variable(np.array(rows, F32)) for rows in ([[1, 2], [3, 4]], [[2, 0], [1, 1]]))

        def step() -> list[Any]:
            xp = cs.get_array_module()
            x = xp.asarray(np.array([[1, 1], [0, 2]], F32))
            found = [x @ w, w @ x, w @ v, x + w, w - x, x / w, w**x, x < w, w >= x, w + v, [1, 2] * w, xp.tanh(w)]
            assert all(isinstance(each, xp.ndarray) for each in found)
            return [each.get() for each in found]

        found = strategy.run(step)
        with pytest.raises(TypeError) as refused:
            strategy.run(lambda: cs.get_array_module().matmul(w, w))
        assert CUPY_ARRAYS in "".join(traceback.format_exception(refused.value))
        a, b, x = w.numpy(), v.numpy(), np.array([[1, 1], [0, 2]], F32)
    expected = [x @ a, a @ x, a @ b, x + a, a - x, x / a, a**x, x < a, a >= x, a + b, np.array([1, 2], F32) * a]
    for ours, theirs in zip(found, [*expected, np.tanh(a)], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert ours.dtype == theirs.dtype


def test_variables_on_the_same_gpu_are_copied_there_and_keep_their_bits() -> None:
    with cs.CentralStorageStrategy(["gpu:0"], "gpu:0") as strategy:
        with strategy.scope():
            variables = [cs.Variable(np.full((100, n + 1), n, F32)) for n in range(20)]  # at many offsets
            optimizer = cs.optimizers.SGD(1.0)

        def step() -> tuple[bool, bool]:
            xp = cs.get_array_module()
            held = [xp.asarray(v) for v in variables]
            before = [float(array.sum()) for array in held]
            optimizer.apply_gradients([(xp.full(v.shape, F32(-1)), v) for v in variables])
            after = [float(xp.asarray(v).sum()) for v in variables]
            grown = [v.size + old == new for v, old, new in zip(variables, before, after, strict=True)]
            return before == [float(array.sum()) for array in held], all(grown)

        for _ in range(3):
            assert strategy.run(step) == (True, True)
        assert variables[7].numpy()[3, 2] == 10


@pytest.mark.parametrize("recovers", [True, False])
def test_gradients_on_the_same_gpu_are_the_servers_memory(recovers: bool) -> None:
    with cs.CentralStorageStrategy(["gpu:0"], "gpu:0", server_recovery=recovers) as strategy:
        with strategy.scope():
            variables = [cs.Variable(np.zeros((100, n + 1), F32)) for n in range(20)]
            optimizer = cs.optimizers.SGD(1.0)

        def step() -> list[int]:
            xp = cs.get_array_module()
            buffers = cs.gradient_buffers(variables)
            for number, buffer in enumerate(buffers):
                xp.multiply(xp.ones(buffer.shape, F32), F32(-number), out=buffer)
            optimizer.apply_gradients(list(zip(buffers, variables, strict=True)))
            return [buffer.data.ptr for buffer in buffers]

        assert strategy.run(step) == strategy.run(step)  # no memory of a pool's
        assert [v.numpy()[0, 0] for v in variables] == [2 * number for number in range(20)]


SCRIPT = """
import sys
import central_storage as cs
strategy = cs.CentralStorageStrategy(["gpu:0", "gpu:0"], "cpu:0")
strategy.run(lambda: None)
counters = strategy.statistics()
print("pids", counters.pid, *(replica.pid for replica in counters.replicas), flush=True)
sys.stdin.read()
"""


def test_no_cuda_where_none_belongs() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=-1, stdout=-1, text=True) as script:
        assert script.stdout is not None
        server, *workers = map(int, script.stdout.readline().split()[1:])
        libraries = {pid: "libcuda" in Path(f"/proc/{pid}/maps").read_text() for pid in (script.pid, server, *workers)}
        script.communicate()
    assert libraries == {script.pid: False, server: False, workers[0]: True, workers[1]: True}


def free_nbytes() -> int:
    """Free memory of the GPU, asked by a process of its own."""
    program = "import cupy; print(cupy.cuda.runtime.memGetInfo()[0])"
    return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


def test_a_killed_workers_memory_is_free_within_five_seconds() -> None:
    program = """
import signal
import central_storage as cs
strategy = cs.CentralStorageStrategy(["gpu:0", "gpu:0"], "cpu:0", max_restarts=0)
@cs.function
def hold():
    xp = cs.get_array_module()
    xp.held = xp.zeros(512 << 20, xp.uint8)
    xp.cuda.Device().synchronize()
strategy.run(hold)
print("pid", strategy.statistics().replicas[0].pid, flush=True)
signal.pause()
"""
    with start("-c", program) as script:
        pid = int(script.wait_for(r"pid (\d+)")[1])
        before = free_nbytes()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + unit(5)
        while free_nbytes() < before + 400 * MIB:
            assert time.monotonic() < deadline
        script.press_ctrl_c()
        script.wait()


def test_too_little_memory_is_said(pair: cs.CentralStorageStrategy) -> None:
    with pair.scope():
        v = cs.Variable(np.zeros(64 * MIB, F32))

    def step() -> float:
        xp = cs.get_array_module()
        held = []
        size = xp.cuda.runtime.memGetInfo()[0]
        while size > MIB:
            try:
                held.append(xp.empty(size, xp.uint8))
            except MemoryError:
                size //= 2
        return float(xp.asarray(v)[0])

    def free() -> int:
        cs.get_array_module().get_default_memory_pool().free_all_blocks()
        return 1

    with pytest.raises(errors.DeviceMemoryError, match=r"gpu:0: 268435456 bytes are needed for variable .* are free"):
        pair.run(step)
    assert pair.run(free) == 1  # CuPy's pool keeps what an error freed, and the next test's processes need it


def test_random_numbers_are_a_function_of_seed_run_and_replica() -> None:
    def draw() -> list[Any]:
        with cs.CentralStorageStrategy(["gpu:0", "gpu:0"], "cpu:0", seed=3) as strategy:
            step = lambda: float(cs.get_array_module().random.normal(size=3).sum())  # noqa: E731
            return [strategy.experimental_local_results(strategy.run(step)) for _ in range(2)]

    first = draw()
    assert len({number for numbers in first for number in numbers}) == 4
    assert draw() == first


def test_replicas_with_several_gpus() -> None:
    if gpu_count() < 2:
        pytest.skip("needs two GPUs, and this machine has one")
    with cs.CentralStorageStrategy([("gpu:0", "gpu:1")], "cpu:0") as strategy:
        with strategy.scope():
            v = cs.Variable(np.zeros(1000, F32))
            optimizer = cs.optimizers.SGD(1.0)

        def step() -> list[int]:
            xp = cs.get_array_module()
            split = strategy.experimental_split_to_logical_devices(xp.arange(1000, dtype=F32), [2])
            with xp.cuda.Device(1):
                gradient = -xp.concatenate([xp.asarray(piece.value) for piece in split.pieces])
            optimizer.apply_gradients([(gradient, v)])
            return [piece.value.device.id for piece in split.pieces]

        assert strategy.run(step) == [0, 1]
        assert np.array_equal(v.numpy(), np.arange(1000))


# --- what users run -------------------------------------------------------------------------------------------------


def test_the_digits_are_learned() -> None:
    ended = run("examples/digits.py", "--devices", "gpu:0,gpu:0", timeout=unit(60)).ok()
    assert float(ended.lines[-1].removeprefix("test accuracy ")) >= 0.97


def test_the_embedding_is_learned() -> None:
    on_gpus, on_cpus = (
        run("examples/embedding.py", "--devices", devices, timeout=unit(60)).ok().lines
        for devices in ("gpu:0,gpu:0", "cpu:0,cpu:1")
    )
    errors_at_the_end = [float(lines[-1].rpartition(" ")[2]) for lines in (on_gpus, on_cpus)]
    assert errors_at_the_end[0] == pytest.approx(errors_at_the_end[1], rel=1e-2)


def test_torch_reads_parameters_without_a_copy(pair: cs.CentralStorageStrategy) -> None:
    torch = pytest.importorskip(
        "torch", reason="torch is not installed beside CuPy; pip install a build of it for CUDA"
    )
    if not torch.cuda.is_available():
        pytest.skip("this torch was built without CUDA, so it can have no GPU")
    with pair.scope():
        w = cs.Variable(np.arange(6, dtype=F32).reshape(2, 3))
        optimizer = cs.optimizers.SGD(1.0)

    def step() -> tuple[bool, str]:
        import torch

        seen = torch.from_dlpack(w)
        is_shared = seen.data_ptr() == w.__cuda_array_interface__["data"][0]
        parameter = seen.detach().requires_grad_()
        (parameter**2).sum().backward()
        optimizer.apply_gradients([(parameter.grad, w)])
        return is_shared, str(seen.device)

    assert pair.experimental_local_results(pair.run(step)) == ((True, "cuda:0"),)
    assert w.numpy().tolist() == [[0, -3, -6], [-9, -12, -15]]
