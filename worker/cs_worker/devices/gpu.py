"""A replica's GPU: copies of variables by version, gradients on their way back, page-locked memory.

A variable is copied when it is read and has changed since, on a stream of its own where it comes from the machine's
memory; what the run before read and has changed is copied when a run begins, beside the first computations. A new value
is a new array, so an array that was read keeps its bits. Streams wait for events and the host for nothing,
until a message is to leave after which others may write what is still read here, or read what is still written
(:meth:`Gpu.settle`). CuPy comes as an argument: ``device`` alone imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cs_proto.arrays import Array
from cs_proto.errors import DeviceMemoryError
from cs_proto.messages import DevicePlace
from cs_runtime.page_locks import PageLocks

__all__ = ["Gpu", "Parameters", "can_be_on", "place"]


_log = logging.getLogger("central_storage.worker")

# So many bytes at both ends of a variable are compared with its mirror where it is read in the server's memory.
_PROBE_NBYTES = 64


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
    """A variable's value on the device; it is there after ``event``. ``is_staged``: it came from host memory."""

    version: int
    array: Any
    event: Any
    is_staged: bool


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
        self._locks = PageLocks(cupy.cuda.runtime, self._wait, self._say_refusal)
        # Kernels read page-locked memory under the address that the host has for it; not every machine can.
        self._reads_host = bool(self._home.attributes.get("CanUseHostPointerForRegisteredMem", 0))
        self._copies: dict[int, _Copy] = {}
        self._used: set[int] = set()
        # What the copying stream still reads or writes: memory that is given back is used again at once.
        self._in_flight: list[Any] = []
        # After the last kernel that reads shared memory.
        self._reading: Any = None
        # Blocks of the server's device memory by handle, opened and checked; those that are closed when this run is
        # over; arrays in them; whether this run has been shown any, which any kernel of it may still use.
        self._opened: dict[bytes, int] = {}
        self._closing: list[int] = []
        self._imports: dict[DevicePlace, Any] = {}
        self._shows_imports = False
        self._has_said: set[str] = set()

    def begin_run(self, parameters: Parameters) -> None:
        """Be current again, whatever the function before did, and bring up to date what it read."""
        self._home.use()
        self.array_module.cuda.Stream.null.use()
        used, self._used = self._used, set()
        self._shows_imports = False
        while self._closing:
            self.array_module.cuda.runtime.ipcCloseMemHandle(self._closing.pop())
        for number in used & self._copies.keys():
            if self._copies[number].version != parameters.version(number):
                old = self._copies.pop(number)
                is_staged = old.is_staged
                del old  # its memory may be what the new one takes
                if not is_staged:  # copies on this device are fast, and its place may have to be asked
                    continue
                try:
                    self._start_copy(number, parameters, None)
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
        self._used.add(number)
        copy = self._copies.get(number)
        if copy is None or copy.version != parameters.version(number):
            copy = self._start_copy(number, parameters, self._variable(number, parameters))
        return self._ready(copy)

    def rows(self, number: int, rows: np.ndarray, parameters: Parameters) -> Any:
        cupy = self.array_module
        copy = self._copies.get(number)
        with self._home:
            if (table := self._variable(number, parameters)) is not None:
                pass
            elif copy is not None and copy.version == parameters.version(number):
                table = self._ready(copy)
            else:
                host = parameters.view(number)
                if not self._reads_host or not self._locks.covers(*_bounds(host)):
                    return self.bring(host[rows])
                memory = cupy.cuda.UnownedMemory(_address(host), host.nbytes, host, self._home.id)
                table = cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))
            nbytes = rows.size * table.nbytes // max(len(table), 1)
            with self._memory(nbytes, f"{rows.size} rows of variable {parameters.name(number)}"):
                found = table[cupy.asarray(rows)]
            self._reading = cupy.cuda.get_current_stream().record(self._reading)
            return found

    def _variable(self, number: int, parameters: Parameters) -> Any:
        place = parameters.on_device(number)
        if place is None:
            return None
        return self._import(place, parameters.view(number), is_mirror=True)

    def _import(self, place: DevicePlace, like: np.ndarray | Array, *, is_mirror: bool = False) -> Any:
        """The array that the server has on this device; None where its memory cannot be opened, or does not show there
        what ``like`` holds, where it is the mirror."""
        if place not in self._imports:
            self._imports[place] = self._imported(place, like, is_mirror)
        found = self._imports[place]
        self._shows_imports |= found is not None
        return found

    def _imported(self, place: DevicePlace, like: np.ndarray | Array, is_mirror: bool) -> Any:
        cupy = self.array_module
        start = self._open(place)
        if not start:
            return None
        address = start + place.offset
        is_it = place.holds(like.nbytes)
        if is_it and is_mirror:
            raw = np.asarray(like).reshape(-1).view(np.uint8)
            begins, ends = raw[:_PROBE_NBYTES], raw[-_PROBE_NBYTES:]
            is_it = self._shows(address, begins) and self._shows(address + raw.nbytes - ends.nbytes, ends)
        if not is_it:
            self._say_other_bytes()
            return None
        self._say(f"transport CUDA IPC: variables on {self.name} are copied there, rows read where they lie")
        memory = cupy.cuda.UnownedMemory(address, like.nbytes, self, self._home.id)
        return cupy.ndarray(like.shape, like.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def _open(self, place: DevicePlace) -> int:
        """Where a block of the server's begins here; 0 where it cannot be opened, or shows other bytes than the server
        has written to its ends: a driver may open more than was meant."""
        if place.handle not in self._opened:
            self._opened[place.handle] = 0
            runtime = self.array_module.cuda.runtime
            mark = np.frombuffer(place.mark, np.uint8)
            try:
                with self._home:
                    start = runtime.ipcOpenMemHandle(place.handle)
                    try:
                        is_it = all(self._shows(start + offset, mark) for offset in place.marked)
                    except runtime.CUDARuntimeError:  # it ends before
                        is_it = False
                    if not is_it:
                        runtime.ipcCloseMemHandle(start)
                        start = 0
            except runtime.CUDARuntimeError as error:
                # The text alone: an error that a log keeps would keep the service's memory by its frames.
                self._say(f"transport staging: the server's memory on {self.name} cannot be opened ({error!s})")
            else:
                self._opened[place.handle] = start
                if not start:
                    self._say_other_bytes()
        return self._opened[place.handle]

    def _shows(self, address: int, expected: np.ndarray) -> bool:
        """Whether these bytes, uint8 [n], are at an address of the device."""
        runtime, seen = self.array_module.cuda.runtime, np.empty_like(expected)
        with self._home:
            runtime.memcpy(_address(seen), address, seen.nbytes, runtime.memcpyDeviceToHost)
        return bool(np.array_equal(seen, expected))

    def _say_other_bytes(self) -> None:
        self._say(f"transport staging: the server's memory on {self.name} shows other bytes by CUDA IPC")

    def _say(self, what: str) -> None:
        if what not in self._has_said:
            self._has_said.add(what)
            _log.warning("%s", what)

    def _say_refusal(self, reason: str) -> None:
        self._say(f"transport pageable memory: {reason}; copies to and from {self.name} are slower")

    def _ready(self, copy: _Copy) -> Any:
        """The array, which what is computed from now on waits for."""
        if copy.event is not None:
            if copy.event.done:
                copy.event = None
            else:
                with self._home:
                    self.array_module.cuda.get_current_stream().wait_event(copy.event)
        return copy.array

    def _start_copy(self, number: int, parameters: Parameters, imported: Any) -> _Copy:
        """Copy the variable from ``imported``, or from host memory where that is None."""
        host, version = parameters.view(number), parameters.version(number)
        self._copies.pop(number, None)
        with self._home, self._memory(host.nbytes, f"variable {parameters.name(number)}"):
            array = self._empty(host)
            if not host.nbytes:
                event = None
            elif imported is not None:
                array[...] = imported
                event = self.array_module.cuda.get_current_stream().record()
            else:
                # The memory may be that of an array which kernels of this stream still use.
                self._copying.wait_event(self.array_module.cuda.get_current_stream().record())
                kind = self.array_module.cuda.runtime.memcpyHostToDevice
                self._copy(array.data.ptr, _address(host), host, kind)
                event = self._copying.record()
                self._in_flight.append(array)
        copy = self._copies[number] = _Copy(version, array, event, imported is None)
        return copy

    def _copy(self, target: int, source: int, host: np.ndarray, kind: int) -> None:
        """Order a copy between two addresses, of which one is that of ``host``."""
        for start, stop in self._locks.parts(_address(host), host.nbytes):
            self.array_module.cuda.runtime.memcpyAsync(
                target + start, source + start, stop - start, kind, self._copying.ptr
            )

    def _empty(self, like: np.ndarray) -> Any:
        cupy = self.array_module
        try:
            return cupy.empty(like.shape, like.dtype)
        except cupy.cuda.memory.OutOfMemoryError:
            # Copies that this run has not read are kept for the case that nothing changes; here they are in the way.
            for number in self._copies.keys() - self._used:
                del self._copies[number]
            self._wait()
            return cupy.empty(like.shape, like.dtype)

    # --- from the device ------------------------------------------------------------------------------------------

    def buffers(self, places: Sequence[np.ndarray]) -> list[Any]:
        nbytes = sum(place.nbytes for place in places)
        with self._home, self._memory(nbytes, f"gradients of {len(places)} variables"):
            return [self._empty(place) for place in places]

    def shared(self, places: Sequence[DevicePlace | None], arrays: Sequence[Array]) -> list[Any] | None:
        found = []
        for place, array in zip(places, arrays, strict=True):
            imported = None if place is None else self._import(place, array)
            if imported is None:
                return None
            found.append(imported)
        return found

    def put(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        cupy = self.array_module
        nbytes = sum(source.nbytes for source, target in pairs if source is not target)
        low = min((target.data.ptr for _, target in pairs), default=0)
        high = max((target.data.ptr + target.nbytes for _, target in pairs), default=0)
        found = []
        with self._home, self._memory(nbytes, f"copies of {len(pairs)} gradients on their way to the server"):
            for source, target in pairs:
                if source is target:
                    continue
                array = self._at_home(source) if isinstance(source, cupy.ndarray) else cupy.asarray(source)
                # One that was computed into the buffer of another variable is saved before that one's gets there.
                found.append((array.copy() if low <= array.data.ptr < high else array, target))
            for array, target in found:
                target[...] = array

    def fetch(self, pairs: Sequence[tuple[Any, np.ndarray]], *, may_change: bool) -> None:
        cupy = self.array_module
        nbytes = sum(source.nbytes for source, _ in pairs)
        with self._home:
            with self._memory(nbytes, f"contiguous copies of {len(pairs)} arrays on their way to the server"):
                found = [(cupy.ascontiguousarray(self._at_home(source)), target) for source, target in pairs]
            current = cupy.cuda.get_current_stream()
            self._copying.wait_event(current.record())
            for array, target in found:
                self._copy(_address(target), array.data.ptr, target, cupy.cuda.runtime.memcpyDeviceToHost)
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
            for writable in (True, False):
                spans = [_bounds(array) for array in arrays if array.flags.writeable is writable]
                self._locks.lock(spans, writable=writable)

    def forget(self, numbers: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        for number in numbers:
            self._copies.pop(number, None)
        self._imports.clear()
        with self._home:
            for array in arrays:
                self._locks.unlock(*_bounds(array))

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


def _bounds(array: np.ndarray) -> tuple[int, int]:
    return _address(array), _address(array) + array.nbytes
