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

from central_storage.devices import canonical, full_name, logical_devices, of_replica
from central_storage.gpus import local_number, require_cupy
from cs_proto.errors import DeviceError

__all__ = ["Device", "open_device", "place"]


@dataclass(frozen=True)
class Device:
    """What a replica computes on: ``name`` as ``cpu:0`` (``cpu:0+cpu:1`` for several), the ``full_names`` of its
    devices as TensorFlow writes them, NumPy or CuPy.

    ``bring`` gives a host array as one of this device: itself on a CPU, a copy on a GPU. ``seed`` seeds the device's
    random state, beside Python's and NumPy's.
    """

    name: str
    full_names: tuple[str, ...]
    array_module: ModuleType
    bring: Callable[[np.ndarray], Any]
    seed: Callable[[int], None]


def open_device(name: str) -> Device:
    """The device or devices called ``name``; the first is made current for this process where it is a GPU.

    Raises :class:`DeviceError` where it is no device, or CuPy is missing or cannot use it.
    """
    replica = of_replica(name)
    first, *_ = logical = logical_devices(replica)
    full_names = tuple(map(full_name, logical))
    if not first.startswith("gpu:"):
        return Device(replica, full_names, np, _as_it_is, _nothing)
    cupy = _cupy(first)
    try:
        cupy.cuda.Device(local_number(first)).use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"{first} cannot be used: {error}") from error
    return Device(replica, full_names, cupy, cupy.asarray, cupy.random.seed)


def place(array: Any, name: str) -> Any:
    """``array`` in the memory of the device called ``name``; itself where it is there already, or holds strings.

    Raises :class:`DeviceError` where that is no device, or CuPy is missing or cannot use it.
    """
    device = canonical(name)
    if not device.startswith("gpu:"):
        return array.get() if hasattr(array, "__cuda_array_interface__") else array
    if array.dtype.kind in "US":
        return array
    cupy = _cupy(device)
    try:
        with cupy.cuda.Device(local_number(device)):
            return cupy.asarray(array)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"{device} cannot be used: {error}") from error


def _cupy(device: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        require_cupy([device])
        raise DeviceError(f"CuPy, which {device} needs, cannot be imported: {error}") from error
    return cupy


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array


def _nothing(seed: int) -> None:
    pass
