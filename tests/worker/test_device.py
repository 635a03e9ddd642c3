"""The device of a replica."""

from __future__ import annotations

import numpy as np
import pytest

from cs_proto.errors import DeviceError
from cs_worker.device import open_device


def test_a_cpu() -> None:
    device = open_device("/device:CPU:3")
    assert device.name == "cpu:3"
    assert device.full_name == "/job:localhost/replica:0/task:0/device:CPU:3"
    assert device.array_module is np


def test_a_gpu_is_refused() -> None:
    with pytest.raises(DeviceError, match="gpu:0 is not served by this version; use compute_devices of the kind cpu:0"):
        open_device("gpu:0")


def test_a_device_that_is_none() -> None:
    with pytest.raises(DeviceError, match="tpu:0"):
        open_device("tpu:0")
