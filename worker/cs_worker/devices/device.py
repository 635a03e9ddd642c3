"""The device of a replica: its full name, the module of its arrays, and copies of arrays to it and back.

Only this module of the worker imports CuPy, and only for a GPU. A replica on a CPU computes with NumPy on views of the
parameters themselves; :mod:`.gpu` implements a replica on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from central_storage.core.devices.device_names import canonical, full_name, logical_devices, of_replica
from cs_proto.arrays import Array
from cs_proto.errors import DeviceError
from cs_proto.messages import DevicePlace
from cs_runtime.gpus import local_number, require_cupy

if TYPE_CHECKING:
    from . import gpu

__all__ = ["Device", "open_device", "place"]


class Device(Protocol):
    """The device of a replica.

    ``name`` is such as ``cpu:0``, or ``cpu:0+cpu:1`` for several. ``full_names`` are its devices' names as TensorFlow
    writes them. ``array_module`` is NumPy or CuPy. ``is_host`` is true if its arrays lie in host memory. ``uuid``
    identifies a GPU across machines.
    """

    name: str
    full_names: tuple[str, ...]
    array_module: Any
    is_host: bool
    uuid: bytes

    def begin_run(self, parameters: gpu.Parameters) -> None:
        """Begin a run. Start copying the variables that the last run read to the device, if they have changed."""

    def seed(self, number: int) -> None:
        """Seed the device's random state, in addition to Python's and NumPy's."""

    def generator(self, bits: np.random.Philox) -> Any:
        """A generator of the device: on a CPU over ``bits``, on a GPU CuPy's, seeded with their next 64 bits."""

    def keep_random_state(self) -> Callable[[], None]:
        """Save the random state; the returned function restores it."""

    def bring(self, array: np.ndarray) -> Any:
        """A host array as an array of this device: the same array on a CPU, a copy on a GPU. Strings stay in host
        memory."""

    def view(self, number: int, parameters: gpu.Parameters) -> Any:
        """A variable's value, read-only. On a GPU it is a copy, which is replaced when the variable has changed."""

    def restore(self, numbers: Iterable[int]) -> None:
        """Copy these variables anew when they are next read, because the function may have written to its copies."""

    def rows(self, number: int, rows: np.ndarray, parameters: gpu.Parameters) -> Any:
        """A copy of some rows of a variable; only these rows are copied to the device. ``rows`` is int64 of any shape,
        and all numbers are valid."""

    def buffers(self, places: Sequence[np.ndarray]) -> list[Any]:
        """Arrays to compute the gradients for ``places`` into: on a CPU, ``places`` themselves."""

    def shared(self, places: Sequence[DevicePlace | None], arrays: Sequence[Array]) -> list[Any] | None:
        """Arrays like ``arrays`` at ``places`` in the server's memory on this device; None if some cannot be opened."""

    def put(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Copy gradients to the arrays that :meth:`shared` returned, unless they are the same arrays."""

    def fetch(self, pairs: Sequence[tuple[Any, np.ndarray]], *, may_change: bool) -> None:
        """Start copies of arrays of this device to host memory; they are complete after the next :meth:`settle`.
        ``may_change``: the user may write to the arrays before that."""

    def settle(self) -> None:
        """Wait until the device neither reads nor writes shared memory. Call this before every message that lets other
        processes read or write it."""

    def lock(self, arrays: Sequence[np.ndarray]) -> None:
        """Page-lock the memory of host arrays, so that copies are direct and asynchronous."""

    def forget(self, numbers: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Forget these variables, whose host arrays are gone."""

    def close_imports(self) -> None:
        """Close the memory of a server that has ended."""

    def close(self) -> None:
        """Release all host memory. Call this once, in the thread that used the device."""


class _Host:
    """One CPU, or several, which share one memory."""

    def __init__(self, name: str, full_names: tuple[str, ...]) -> None:
        self.is_host = True
        self.uuid = b""
        self.array_module: Any = np
        self.name = name
        self.full_names = full_names

    def begin_run(self, parameters: gpu.Parameters) -> None:
        pass

    def seed(self, number: int) -> None:
        pass

    def generator(self, bits: np.random.Philox) -> np.random.Generator:
        return np.random.Generator(bits)

    def keep_random_state(self) -> Callable[[], None]:
        return _nothing

    def bring(self, array: np.ndarray) -> np.ndarray:
        return array

    def view(self, number: int, parameters: gpu.Parameters) -> np.ndarray:
        return parameters.view(number)

    def restore(self, numbers: Iterable[int]) -> None:
        pass

    def rows(self, number: int, rows: np.ndarray, parameters: gpu.Parameters) -> np.ndarray:
        return np.take(parameters.view(number), rows, axis=0)  # three times as fast as indexing

    def buffers(self, places: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(map(np.ndarray.view, places))

    def shared(self, places: Sequence[DevicePlace | None], arrays: Sequence[Array]) -> None:
        return None

    def put(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        pass

    def fetch(self, pairs: Sequence[tuple[Any, np.ndarray]], *, may_change: bool) -> None:
        for source, target in pairs:
            np.copyto(target, source)

    def settle(self) -> None:
        pass

    def lock(self, arrays: Sequence[np.ndarray]) -> None:
        pass

    def forget(self, numbers: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        pass

    def close_imports(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_device(name: str) -> Device:
    """The device or devices ``name``; if the first is a GPU, it becomes the current one of this thread.

    Raises :class:`DeviceError` if there is no such device, or if CuPy is missing or cannot use it.
    """
    replica = of_replica(name)
    logical = logical_devices(replica)
    full_names = tuple(map(full_name, logical))
    if not logical[0].startswith("gpu:"):
        return _Host(replica, full_names)
    from . import gpu  # imported late, here and below, because most workers have no GPU

    cupy = _cupy(logical[0])
    try:
        return gpu.Gpu(
            replica, full_names, cupy, [local_number(device) for device in logical if device.startswith("gpu:")]
        )
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"{replica} cannot be used: {error}") from error


def place(array: Any, name: str) -> Any:
    """``array`` in the memory of the device ``name``; ``array`` itself if it is there already, or holds strings.

    Raises :class:`DeviceError` if there is no such device, or if CuPy is missing or cannot use it, and
    DeviceMemoryError if its memory does not suffice.
    """
    device = canonical(name)
    if not device.startswith("gpu:"):
        return array.get() if hasattr(array, "__cuda_array_interface__") else array
    from . import gpu

    if not gpu.can_be_on(array):
        return array
    cupy = _cupy(device)
    try:
        return gpu.place(cupy, array, local_number(device), device)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"{device} cannot be used: {error}") from error


def _cupy(device: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        require_cupy([device])
        raise DeviceError(f"CuPy, which {device} needs, cannot be imported: {error}") from error
    return cupy


def _nothing() -> None:
    pass
