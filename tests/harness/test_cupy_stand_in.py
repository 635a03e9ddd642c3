"""The stand-in for CuPy refuses what CuPy refuses, and what is not waited for is not there."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.stand_in_gpus import StandInGpus, stand_in_gpus


@pytest.fixture
def gpus() -> Iterator[StandInGpus]:
    with stand_in_gpus(2, nbytes=1 << 20) as gpus:
        yield gpus


def test_arrays_are_computed_with_and_come_back_when_they_are_asked_for(gpus: StandInGpus) -> None:
    cp = gpus.cupy
    a = cp.asarray(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    assert (type(a) is cp.ndarray, isinstance(a, np.ndarray), a.dtype, a.shape) == (True, False, np.float32, (2, 3))
    assert (a @ a.T).get().tolist() == [[5, 14], [14, 50]]
    assert type(np.sum(a)) is cp.ndarray
    row = a[1]
    row += 1  # a view
    a[0] = row * 2
    assert a.get().tolist() == [[8, 10, 12], [4, 5, 6]]
    out = cp.empty((2, 3), np.float32)
    assert np.add(a, np.float32(1), out=out) is out
    assert cp.concatenate([out, a]).shape == (4, 3)
    assert float(out[0, 0]) == 9


def test_host_and_device_do_not_mix(gpus: StandInGpus) -> None:
    cp = gpus.cupy
    host, a = np.ones(3), cp.ones(3)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(a)
    for mix in (lambda: a + host, lambda: host + a, lambda: cp.add(a, host), lambda: a.__setitem__(0, host)):
        with pytest.raises(TypeError, match="Unsupported type"):
            mix()
    assert not hasattr(a.flags, "writeable")
    with cp.cuda.Device(1):
        with pytest.raises(ValueError, match="array device = 0 while current = 1"):
            a + 1
        assert cp.asarray(a).device.id == 1


def test_what_is_not_waited_for_is_not_there(gpus: StandInGpus) -> None:
    cp = gpus.cupy
    memory = mmap.mmap(-1, 8192)
    host = np.frombuffer(memory, np.float64)
    host[:] = 1
    cp.cuda.runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    stream = cp.cuda.Stream(non_blocking=True)
    target = cp.empty(host.shape)
    target.set(host, stream=stream)
    event = stream.record()
    assert target[0] > 1e300
    host[0] = 2  # too early: the copy has not been made
    cp.cuda.get_current_stream().wait_event(event)
    assert target[:2].get().tolist() == [2, 1]

    target += 1
    cp.cuda.get_current_stream().record(event)
    stream.wait_event(event)
    target.get(stream=stream, out=host, blocking=False)
    assert host[0] == 2
    stream.synchronize()
    assert host[:2].tolist() == [3, 2]
    with pytest.raises(RuntimeError, match="already registered"):
        cp.cuda.runtime.hostRegister(host.ctypes.data + 4096, 1, 0)
    cp.cuda.runtime.hostUnregister(host.ctypes.data)
    counts = gpus.counts(os.getpid())
    assert counts is not None
    assert (counts["host_to_device"], counts["host_to_device_nbytes"]) == (1, 8192)
    assert counts["page_locked_nbytes"] == 0


def test_a_computation_is_not_seen_by_a_stream_that_does_not_wait_for_it(gpus: StandInGpus) -> None:
    cp = gpus.cupy
    other = cp.cuda.Stream(non_blocking=True)
    a = cp.ones(3) * 5
    with other:
        assert a.get()[0] > 1e300
        other.wait_event(cp.cuda.Stream.null.record())
        assert a.get()[0] == 5
    with cp.cuda.Stream():  # the null stream and the ordinary ones wait for each other
        assert (cp.ones(3) * 5).get()[0] == 5


def test_page_locked_memory_is_read_in_place(gpus: StandInGpus) -> None:
    cp = gpus.cupy
    host = np.arange(1000.0)

    def view() -> object:
        memory = cp.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
        return cp.ndarray(host.shape, host.dtype, cp.cuda.MemoryPointer(memory, 0))

    with pytest.raises(RuntimeError, match="illegal memory access"):
        view()[[3]]  # type: ignore[index]
    cp.cuda.runtime.hostRegister(host.ctypes.data, host.nbytes, 0)
    assert view()[cp.asarray([3, 4])].get().tolist() == [3, 4]  # type: ignore[index]
    assert cp.counts()["host_reads_nbytes"] == 16
    read_only = np.frombuffer(mmap.mmap(-1, 4096, prot=mmap.PROT_READ), np.uint8)
    with pytest.raises(RuntimeError, match="invalid argument"):
        cp.cuda.runtime.hostRegister(read_only.ctypes.data, 4096, 0)
    cp.cuda.runtime.hostRegister(read_only.ctypes.data, 4096, 8)


def test_memory_is_limited_and_given_back(gpus: StandInGpus) -> None:
    cp = gpus.cupy
    a = cp.empty(1 << 19, np.uint8)
    with pytest.raises(MemoryError, match="Out of memory allocating 1,048,576 bytes"):
        cp.empty(1 << 20, np.uint8)
    with cp.cuda.Device(1):
        cp.empty(1 << 20, np.uint8)
    assert cp.cuda.runtime.memGetInfo() == (1 << 19, 1 << 20)
    del a
    assert cp.cuda.Device().mem_info == (1 << 20, 1 << 20)


def test_another_process_opens_plain_memory(gpus: StandInGpus) -> None:
    cp = gpus.cupy
    runtime = cp.cuda.runtime
    start = runtime.malloc(4096)
    memory = cp.cuda.UnownedMemory(start, 4096, None, 0)
    array = cp.ndarray((512,), np.float64, cp.cuda.MemoryPointer(memory, 0))
    array[...] = 7
    cp.cuda.Device().synchronize()
    program = """
import sys, cupy as cp
start = cp.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(sys.argv[1]))
array = cp.ndarray((2,), float, cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(start, 4096, None, 0), 16))
print(array.get().tolist())
array[...] = 8
cp.cuda.Device().synchronize()
cp.cuda.runtime.ipcCloseMemHandle(start)
"""
    handle = runtime.ipcGetMemHandle(start)
    assert len(handle) == 64
    command = [sys.executable, "-c", program, handle.hex()]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[7.0, 7.0]\n"
    assert array[:4].get().tolist() == [7, 7, 8, 8]
    with pytest.raises(RuntimeError, match="invalid argument"):
        runtime.ipcOpenMemHandle(handle)
    with pytest.raises(RuntimeError, match="invalid argument"):
        runtime.ipcGetMemHandle(cp.empty(3).data.ptr)
    runtime.free(start)


def test_a_context_exists_from_the_first_call_that_needs_one(gpus: StandInGpus) -> None:
    cp = gpus.cupy
    assert cp.cuda.runtime.getDeviceCount() == 2
    assert gpus.counts(os.getpid())["contexts"] == 0  # type: ignore[index]
    cp.cuda.Device(1).use()
    assert gpus.counts(os.getpid())["contexts"] == 0b10  # type: ignore[index]
    with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="invalid device ordinal"):
        cp.cuda.Device(2).use()
    assert gpus.counts(1) is None


def test_random_numbers_have_a_state_for_each_device(gpus: StandInGpus) -> None:
    cp = gpus.cupy
    cp.random.seed(3)
    first = cp.random.normal(size=2).tolist()
    with cp.cuda.Device(1):
        cp.random.seed(4)
        cp.random.normal(size=2)
    kept = cp.random.get_random_state()
    cp.random.set_random_state(cp.random.RandomState(3))
    assert cp.random.normal(size=2).tolist() == first
    cp.random.set_random_state(kept)
    assert cp.random.normal(size=2).tolist() != first


def test_visible_devices(gpus: StandInGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000001,0,7")
    properties = gpus.cupy.cuda.runtime.getDeviceProperties(0)
    assert gpus.cupy.cuda.runtime.getDeviceCount() == 2
    assert properties["uuid"].hex().startswith("00000001")
