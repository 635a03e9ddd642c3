"""The device of a replica: its full name and the array module of its arrays.

A replica on a CPU computes with NumPy on views of the parameters themselves. Nothing else of the worker knows about
devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from central_storage.devices import canonical, full_name
from cs_proto.errors import DeviceError

__all__ = ["Device", "open_device"]


@dataclass(frozen=True)
class Device:
    """What a replica computes on: ``name`` as ``cpu:0``, ``full_name`` as TensorFlow writes it, NumPy or CuPy."""

    name: str
    full_name: str
    array_module: ModuleType


def open_device(name: str) -> Device:
    """The device called ``name``. Raises :class:`DeviceError` where this worker cannot compute on it."""
    device = canonical(name)
    if not device.startswith("cpu:"):
        raise DeviceError(
            f"a replica on {device} is not served by this version; use compute_devices of the kind cpu:0, cpu:1, …"
        )
    return Device(device, full_name(device), np)
