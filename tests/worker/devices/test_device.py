"""The device of a replica."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.stand_in_gpus import StandInGpus, stand_in_gpus

from cs_proto.errors import DeviceError
from cs_worker.devices.device import open_device, place


@pytest.fixture
def gpus() -> Iterator[StandInGpus]:
    with stand_in_gpus(3) as gpus:
        yield gpus


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


def test_a_gpu(gpus: StandInGpus) -> None:
    device = open_device("/gpu:1")
    assert (device.name, device.array_module) == ("gpu:1", gpus.cupy)
    assert gpus.cupy.counts()["contexts"] == 0b10
    host = np.arange(3)
    brought = device.bring(host)
    assert type(brought) is gpus.cupy.ndarray
    assert (brought.device.id, brought.tolist()) == (1, [0, 1, 2])
    device.seed(7)
    drawn = gpus.cupy.random.normal(size=2).tolist()
    device.seed(7)
    assert gpus.cupy.random.normal(size=2).tolist() == drawn


def test_a_replica_that_owns_several(gpus: StandInGpus) -> None:
    device = open_device("/gpu:1+GPU:2")
    assert device.name == "gpu:1+gpu:2"
    assert [name[-5:] for name in device.full_names] == ["GPU:1", "GPU:2"]
    there = place(np.arange(3), device.full_names[1])
    assert there.device.id == 2
    assert gpus.cupy.cuda.Device().id == 1
    back = place(there, "cpu:0")
    assert type(back) is np.ndarray
    assert back.tolist() == [0, 1, 2]
    texts = np.array(["a"])
    assert place(texts, "gpu:1") is texts
    with pytest.raises(DeviceError, match="gpu:3 cannot be used"):
        place(back, "gpu:3")
    assert place(back, "cpu:7") is back


def test_a_gpu_that_does_not_exist(gpus: StandInGpus) -> None:
    with pytest.raises(DeviceError, match=r"gpu:3 cannot be used: .*invalid device ordinal"):
        open_device("gpu:3")


def test_a_device_that_is_none() -> None:
    with pytest.raises(DeviceError, match="tpu:0"):
        open_device("tpu:0")
