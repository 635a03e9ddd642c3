"""``device`` says where ``convert_to_tensor`` puts arrays; outside a replica that is host memory."""

from __future__ import annotations

import numpy as np
import pytest

import central_storage as cs
from central_storage.core.devices import device_names


@pytest.mark.parametrize("name", ["/cpu:0", "CPU:7", "/job:localhost/replica:0/task:0/device:CPU:1", None])
def test_on_a_cpu_an_array_is_itself(name: str | None) -> None:
    array = np.arange(3)
    with cs.device(name):
        assert np.shares_memory(cs.convert_to_tensor(array), array)
        assert cs.convert_to_tensor([1.0]).dtype == np.float32
        assert cs.convert_to_tensor([1], "float64").dtype == np.float64


def test_what_is_no_device() -> None:
    for name in ("tpu:0", "", "gpu:77"):
        with pytest.raises(cs.errors.DeviceError), cs.device(name):
            pass


def test_a_gpu_is_reached_in_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_names, "gpu_count", lambda: 1)
    with cs.device("/gpu:0"):
        with pytest.raises(cs.errors.DeviceError, match="inside a replica function"):
            cs.convert_to_tensor([1])
        with cs.device("cpu:0"):
            assert cs.convert_to_tensor([1]).tolist() == [1]
        with cs.device(None):
            assert cs.convert_to_tensor([1]).tolist() == [1]
    assert cs.convert_to_tensor([1]).tolist() == [1]
