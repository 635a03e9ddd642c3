"""The device of a replica."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping

import numpy as np
import pytest

from cs_proto.errors import DeviceError
from cs_worker.device import open_device, place


def test_a_cpu() -> None:
    device = open_device("/device:CPU:3")
    assert device.name == "cpu:3"
    assert device.full_names == ("/job:localhost/replica:0/task:0/device:CPU:3",)
    assert device.array_module is np
    array = np.arange(3)
    assert device.bring(array) is array
    device.seed(7)


def test_a_gpu_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"gpu:0 needs CuPy: pip install 'central-storage\[cuda12\]' or"):
        open_device("gpu:0")


class NoSuchDevice(Exception):
    """What CuPy raises for a device number that does not exist."""


def cupy(count: int, told: list[object]) -> types.ModuleType:
    """Stands for CuPy on a machine with ``count`` GPUs: its arrays are NumPy's, tagged by a subclass."""

    class Chosen:
        def __init__(self, number: int) -> None:
            self.number = number

        def use(self) -> None:
            if self.number >= count:
                raise NoSuchDevice("invalid device ordinal")
            told.append(self.number)

        def __enter__(self) -> None:
            self.use()

        def __exit__(self, *of_error: object) -> None:
            told.append("left")

    module = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(CUDARuntimeError=NoSuchDevice)
    members = {
        "cuda": types.SimpleNamespace(Device=Chosen, runtime=runtime),
        "random": types.SimpleNamespace(seed=lambda number: told.append(("seed", number))),
        "asarray": lambda array: np.array(array).view(OnDevice),
    }
    module.__dict__.update(members)
    return module


class OnDevice(np.ndarray):
    """An array that is in device memory."""

    __cuda_array_interface__: Mapping[str, object] = {}

    def get(self) -> np.ndarray:
        """A copy in host memory."""
        return np.array(self)


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    module = cupy(2, told)
    monkeypatch.setitem(sys.modules, "cupy", module)
    device = open_device("/gpu:1")
    assert (device.name, device.array_module, told) == ("gpu:1", module, [1])
    host = np.arange(3)
    brought = device.bring(host)
    assert isinstance(brought, OnDevice)
    assert brought.tolist() == [0, 1, 2]
    assert not np.shares_memory(brought, host)
    device.seed(7)
    assert told == [1, ("seed", 7)]


def test_a_replica_that_owns_several(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setitem(sys.modules, "cupy", cupy(3, told))
    device = open_device("/gpu:1+GPU:2")
    assert device.name == "gpu:1+gpu:2"
    assert [name[-5:] for name in device.full_names] == ["GPU:1", "GPU:2"]
    assert told == [1]
    there = place(np.arange(3), device.full_names[1])
    assert isinstance(there, OnDevice)
    assert told == [1, 2, "left"]
    back = place(there, "cpu:0")
    assert type(back) is np.ndarray
    assert back.tolist() == [0, 1, 2]
    texts = np.array(["a"])
    assert place(texts, "gpu:1") is texts
    with pytest.raises(DeviceError, match="gpu:3 cannot be used"):
        place(back, "gpu:3")
    assert place(back, "cpu:7") is back


def test_a_gpu_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy(1, []))
    with pytest.raises(DeviceError, match="gpu:3 cannot be used: invalid device ordinal"):
        open_device("gpu:3")


def test_a_device_that_is_none() -> None:
    with pytest.raises(DeviceError, match="tpu:0"):
        open_device("tpu:0")
