"""A replica's GPU: copies of variables by version, gradients on their way back, page-locked memory.

A variable is copied when it is read and has changed since, on a stream of its own; what the run before read and has
changed is copied when a run begins, beside the first computations. Streams wait for events and the host for nothing,
until a message is to leave after which others may write what is still read here, or read what is still written
(:meth:`Gpu.settle`). CuPy comes as an argument: ``device`` alone imports it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cs_proto.errors import DeviceMemoryError
from cs_proto.messages import DevicePlace

from .locking import PageLocks

__all__ = ["Gpu", "Parameters", "can_be_on", "place"]


_log = logging.getLogger("central_storage.worker")


class Parameters(Protocol):
    """What a worker knows of variables."""

    def version(self, number: int) -> int:
        """A number that changes with the value."""

    def view(self, number: int) -> np.ndarray:
        """The value in host memory, read-only."""

    def name(self, number: int) -> str:
        """The variable's name."""

    def on_device(self, number: int) -> DevicePlace | None:
        """Where the value lies on this very device, in memory of the server's."""


@dataclass
class _Copy:
    """A variable's value on the device; it is there after ``event``."""

    version: int
    array: Any
    event: Any


class Gpu:
    """The GPUs of a replica, of which the first is its home. Used by one thread."""

    def __init__(self, name: str, full_names: tuple[str, ...], cupy: Any, numbers: Sequence[int]) -> None:
        """``numbers`` are CUDA's. Raises CuPy's errors where the home cannot be used."""
        self.name = name
        self.full_names = full_names
        self.is_host = False
        self.array_module = cupy
        self._numbers = numbers
        self._home = cupy.cuda.Device(numbers[0])
        self._home.use()
        # CuPy reads a C string: what stands behind the sixteen bytes may follow, and a zero ends it.
        self.uuid = bytes(cupy.cuda.runtime.getDeviceProperties(numbers[0])["uuid"][:16])
        self._copying = cupy.cuda.Stream(non_blocking=True)
        self._locks = PageLocks(cupy, self._wait)
        # Kernels read page-locked memory under the address that the host has for it; not every machine can.
        self._reads_host = bool(self._home.attributes.get("CanUseHostPointerForRegisteredMem", 0))
        self._copies: dict[int, _Copy] = {}
        self._used: set[int] = set()
        # Copies of this run that a commit has made old. Whoever reads a variable in CUDA's way holds the variable, not
        # its memory.
        self._superseded: list[Any] = []
        # What the copying stream still reads or writes: memory that is given back is used again at once.
        self._in_flight: list[Any] = []
        # After the last kernel that reads shared memory.
        self._reading: Any = None
        # Blocks of the server's device memory by handle, opened; those that are closed when this run is over; variables
        # in them; whether this run has been shown any, which any kernel of it may still read.
        self._opened: dict[bytes, int] = {}
        self._closing: list[int] = []
        self._imports: dict[int, Any] = {}
        self._shows_imports = False

    def begin_run(self, parameters: Parameters) -> None:
        """Be current again, whatever the function before did, and bring up to date what it read."""
        self._home.use()
        self.array_module.cuda.Stream.null.use()
        used, self._used = self._used, set()
        self._superseded.clear()
        self._shows_imports = False
        while self._closing:
            self.array_module.cuda.runtime.ipcCloseMemHandle(self._closing.pop())
        for number in used & self._copies.keys():
            if self._copies[number].version != parameters.version(number):
                del self._copies[number]  # its memory may be what the new one takes
                try:
                    self._start_copy(number, parameters)
                except DeviceMemoryError:  # whoever reads it next is told, if it does not fit then either
                    return

    # --- random numbers -------------------------------------------------------------------------------------------

    def seed(self, number: int) -> None:
        random = self.array_module.random
        for place, device in enumerate(self._numbers):
            with self.array_module.cuda.Device(device):
                random.seed((number + place) % 2**32)

    def keep_random_state(self) -> Callable[[], None]:
        cupy, kept = self.array_module, []
        for device in self._numbers:
            with cupy.cuda.Device(device):
                kept.append((device, cupy.random.get_random_state()))
                cupy.random.set_random_state(cupy.random.RandomState(0))

        def restore() -> None:
            for device, state in kept:
                with cupy.cuda.Device(device):
                    cupy.random.set_random_state(state)

        return restore

    # --- to the device --------------------------------------------------------------------------------------------

    def bring(self, array: np.ndarray) -> Any:
        if not can_be_on(array):
            return array
        with self._home, self._memory(array.nbytes, f"an array {array.dtype}{list(array.shape)}"):
            return self.array_module.asarray(array)

    def view(self, number: int, parameters: Parameters) -> Any:
        if (imported := self._import(number, parameters)) is not None:
            return imported
        self._used.add(number)
        copy = self._copies.get(number)
        if copy is None or copy.version != parameters.version(number):
            copy = self._start_copy(number, parameters)
        return self._ready(copy)

    def rows(self, number: int, rows: np.ndarray, parameters: Parameters) -> Any:
        cupy = self.array_module
        copy = self._copies.get(number)
        with self._home:
            if (table := self._import(number, parameters)) is not None:
                pass
            elif copy is not None and copy.version == parameters.version(number):
                table = self._ready(copy)
            else:
                host = parameters.view(number)
                if not self._reads_host or not self._locks.covers(host):
                    return self.bring(host[rows])
                memory = cupy.cuda.UnownedMemory(_address(host), host.nbytes, host, self._home.id)
                table = cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))
            nbytes = rows.size * table.nbytes // max(len(table), 1)
            with self._memory(nbytes, f"{rows.size} rows of variable {parameters.name(number)}"):
                found = table[cupy.asarray(rows)]
            self._reading = cupy.cuda.get_current_stream().record(self._reading)
            return found

    def _import(self, number: int, parameters: Parameters) -> Any:
        """The variable where the server has it on this device; None where it does not, or it cannot be opened."""
        place = parameters.on_device(number)
        if place is None:
            return None
        found = self._imports.get(number)
        if found is None:
            cupy, host = self.array_module, parameters.view(number)
            start = self._open(place.handle)
            if not start:
                return None
            memory = cupy.cuda.UnownedMemory(start + place.offset, host.nbytes, self, self._home.id)
            found = cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))
            self._imports[number] = found
        self._shows_imports = True
        return found

    def _open(self, handle: bytes) -> int:
        """Where the block behind a handle begins here; 0 where it cannot be opened."""
        if handle not in self._opened:
            runtime = self.array_module.cuda.runtime
            try:
                with self._home:
                    self._opened[handle] = runtime.ipcOpenMemHandle(handle)
            except runtime.CUDARuntimeError as error:
                self._opened[handle] = 0
                # The text alone: an error that a log keeps would keep the service's memory by its frames.
                _log.warning("variables on %s cannot be opened (%s): they are copied", self.name, str(error))
            else:
                _log.warning("transport CUDA IPC: variables on %s are read where they lie", self.name)
        return self._opened[handle]

    def _ready(self, copy: _Copy) -> Any:
        """The array, which what is computed from now on waits for."""
        if copy.event is not None:
            if copy.event.done:
                copy.event = None
            else:
                with self._home:
                    self.array_module.cuda.get_current_stream().wait_event(copy.event)
        return copy.array

    def _start_copy(self, number: int, parameters: Parameters) -> _Copy:
        host, version = parameters.view(number), parameters.version(number)
        if number in self._copies:
            self._superseded.append(self._copies.pop(number).array)
        with self._home, self._memory(host.nbytes, f"variable {parameters.name(number)}"):
            array = self._empty(host)
            if not host.nbytes:
                event = None
            else:
                # The memory may be that of an array which kernels of this stream still use.
                self._copying.wait_event(self.array_module.cuda.get_current_stream().record())
                array.data.copy_from_host_async(ctypes.c_void_p(_address(host)), host.nbytes, self._copying)
                event = self._copying.record()
                self._in_flight.append(array)
        copy = self._copies[number] = _Copy(version, array, event)
        return copy

    def _empty(self, like: np.ndarray) -> Any:
        cupy = self.array_module
        try:
            return cupy.empty(like.shape, like.dtype)
        except cupy.cuda.memory.OutOfMemoryError:
            # Copies that this run has not read are kept for the case that nothing changes; here they are in the way.
            self._superseded.clear()
            for number in self._copies.keys() - self._used:
                del self._copies[number]
            self._wait()
            return cupy.empty(like.shape, like.dtype)

    # --- from the device ------------------------------------------------------------------------------------------

    def buffers(self, places: Sequence[np.ndarray]) -> list[Any]:
        nbytes = sum(place.nbytes for place in places)
        with self._home, self._memory(nbytes, f"gradients of {len(places)} variables"):
            return [self._empty(place) for place in places]

    def fetch(self, pairs: Sequence[tuple[Any, np.ndarray]], *, may_change: bool) -> None:
        cupy = self.array_module
        nbytes = sum(source.nbytes for source, _ in pairs)
        with self._home:
            with self._memory(nbytes, f"contiguous copies of {len(pairs)} arrays on their way to the server"):
                found = [(cupy.ascontiguousarray(self._at_home(source)), target) for source, target in pairs]
            current = cupy.cuda.get_current_stream()
            self._copying.wait_event(current.record())
            for array, target in found:
                if array.nbytes:
                    array.data.copy_to_host_async(ctypes.c_void_p(_address(target)), array.nbytes, self._copying)
            if may_change:
                current.wait_event(self._copying.record())
            self._in_flight += [array for array, _ in found]

    def _at_home(self, array: Any) -> Any:
        return place(self.array_module, array, self._home.id, self.full_names[0])

    def settle(self) -> None:
        if self._in_flight:
            self._wait()
        if self._reading is not None:
            self._reading.synchronize()
        if self._shows_imports:
            self._home.synchronize()

    def _wait(self) -> None:
        self._copying.synchronize()
        self._in_flight.clear()
        if self._reading is not None:
            self._reading.synchronize()

    # --- memory ---------------------------------------------------------------------------------------------------

    def lock(self, arrays: Sequence[np.ndarray]) -> None:
        with self._home:
            self._locks.lock(arrays)

    def forget(self, numbers: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        for number in numbers:
            self._copies.pop(number, None)
            self._imports.pop(number, None)
        with self._home:
            self._locks.unlock(arrays)

    def close_imports(self) -> None:
        self._imports.clear()
        self._closing += filter(None, self._opened.values())
        self._opened.clear()

    def close(self) -> None:
        with self._home:
            self.settle()
            self.close_imports()
            while self._closing:
                self.array_module.cuda.runtime.ipcCloseMemHandle(self._closing.pop())
            self._locks.close()

    @contextmanager
    def _memory(self, nbytes: int, what: str) -> Iterator[None]:
        """Name the device and what it is used for where its memory does not suffice."""
        try:
            yield
        except self.array_module.cuda.memory.OutOfMemoryError as error:
            copies = [copy.array.nbytes for copy in self._copies.values()]
            raise _too_small(
                self.array_module,
                self.name,
                nbytes,
                what,
                f"; copies of {len(copies)} variables take {sum(copies)} bytes. Take rows of a large table "
                "(cs.nn.embedding_lookup) instead of the whole, or smaller batches",
            ) from error


def can_be_on(array: Any) -> bool:
    """Whether a GPU has arrays of this dtype; strings stay in host memory."""
    return getattr(array.dtype, "kind", "f") in "biufc"


def place(cupy: Any, array: Any, number: int, name: str) -> Any:
    """``array`` on the device with CUDA's ``number``; itself where it is there.

    Raises CuPy's errors where the device cannot be used, :class:`DeviceMemoryError` where its memory does not suffice.
    """
    source = array.device.id if isinstance(array, cupy.ndarray) else number
    if source == number == cupy.cuda.runtime.getDevice() and isinstance(array, cupy.ndarray):
        return array
    ready = None
    if source != number:
        with cupy.cuda.Device(source):
            ready = cupy.cuda.get_current_stream().record()
    with cupy.cuda.Device(number):
        if ready is not None:
            cupy.cuda.get_current_stream().wait_event(ready)
        try:
            return cupy.asarray(array)
        except cupy.cuda.memory.OutOfMemoryError as error:
            what = f"an array {array.dtype}{list(array.shape)}"
            raise _too_small(cupy, name, array.nbytes, what, "; use smaller batches") from error


def _too_small(cupy: Any, name: str, nbytes: int, what: str, plan: str) -> DeviceMemoryError:
    free, total = cupy.cuda.runtime.memGetInfo()
    return DeviceMemoryError(
        f"{name}: {nbytes} bytes wanted for {what}, {free} of {total} bytes are free (CuPy's pool may hold more){plan}"
    )


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
