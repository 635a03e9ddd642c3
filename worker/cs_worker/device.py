"""The device of a replica: its full name, the array module of its arrays, and the way of an array to it.

The one module of the worker that knows CuPy, imported only for a GPU. A replica on a CPU computes with NumPy on views
of the parameters themselves; one on a GPU gets copies through host memory. The way back needs no device: whatever
takes arrays from a replica takes CuPy's, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from central_storage.devices import canonical, full_name
from cs_proto.errors import DeviceError

__all__ = ["Device", "open_device"]


@dataclass(frozen=True)
class Device:
    """What a replica computes on: ``name`` as ``cpu:0``, ``full_name`` as TensorFlow writes it, NumPy or CuPy.

    ``bring`` gives a host array as one of this device: itself on a CPU, a copy on a GPU. ``seed`` seeds the device's
    random state, beside Python's and NumPy's.
    """

    name: str
    full_name: str
    array_module: ModuleType
    bring: Callable[[np.ndarray], Any]
    seed: Callable[[int], None]


def open_device(name: str) -> Device:
    """The device called ``name``, made current for this process where it is a GPU.

    Raises :class:`DeviceError` where it is no device, or CuPy is missing or cannot use it.
    """
    device = canonical(name)
    return _gpu(device) if device.startswith("gpu:") else Device(device, full_name(device), np, _as_it_is, _nothing)


def _gpu(device: str) -> Device:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"a replica on {device} needs CuPy: pip install 'central-storage[cuda12]' or 'central-storage[cuda13]'"
        ) from error
    try:
        cupy.cuda.Device(int(device.partition(":")[2])).use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"{device} cannot be used: {error}") from error
    return Device(device, full_name(device), cupy, cupy.asarray, cupy.random.seed)


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def _nothing(seed: int) -> None:
    pass
