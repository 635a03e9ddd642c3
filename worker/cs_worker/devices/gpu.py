"""A replica's GPU: copies of variables by version, gradients on their way back, page-locked memory.

A variable is copied when it is read and has changed; copies from host memory have a stream of their own. When a run
begins, the changed variables that the last run read are copied while the function begins to compute. A new value is a
new array, so an array that was read keeps its bits. Streams wait for events. The host waits in one place: before a
message that lets others write memory that is still read here, or read memory that is still written
(:meth:`Gpu.settle`). CuPy is an argument, because only ``device`` imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cs_proto.arrays import Array
from cs_proto.errors import DeviceMemoryError
from cs_proto.messages import DevicePlace
from cs_proto.printable import counted
from cs_runtime.shared_memory.mapping import address_of
from cs_runtime.shared_memory.page_locks import PageLocks

__all__ = ["Gpu", "Parameters", "can_be_on", "place"]


_log = logging.getLogger("central_storage.worker")

# Bytes at each end of a variable that are compared with its mirror, if it is read in the server's device memory.
_PROBE_NBYTES = 64


class Parameters(Protocol):
    """The worker's access to variables."""

    def version(self, number: int) -> int:
        """A number that changes whenever the value changes."""

    def view(self, number: int) -> np.ndarray:
        """The value in host memory, read-only."""

    def name(self, number: int) -> str:
        """The variable's name."""

    def on_device(self, number: int) -> DevicePlace | None:
        """The place of the value in the server's memory on this device, or None."""


@dataclass
class _Copy:
    """A variable's value on the device; it is there after ``event``. ``is_staged``: it came from host memory."""

    version: int
    array: Any
    event: Any
    is_staged: bool


class Gpu:
    """The GPUs of a replica; the first is its home. Used by one thread."""

    def __init__(self, name: str, full_names: tuple[str, ...], cupy: Any, numbers: Sequence[int]) -> None:
        """``numbers`` are CUDA's. Raises CuPy's errors if the home cannot be used."""
        self.name = name
        self.full_names = full_names
        self.is_host = False
        self.array_module = cupy
        self._numbers = numbers
        self._home = cupy.cuda.Device(numbers[0])
        self._home.use()
        # CuPy reads it as a C string: a zero byte ends it early, and bytes after the sixteen may follow.
        self.uuid = bytes(cupy.cuda.runtime.getDeviceProperties(numbers[0])["uuid"][:16])
        self._copying = cupy.cuda.Stream(non_blocking=True)
        self._locks = PageLocks(cupy.cuda.runtime, self._wait, self._say_refusal)
        # Whether kernels can read page-locked memory at its host address; not every machine can.
        self._reads_host = bool(self._home.attributes.get("CanUseHostPointerForRegisteredMem", 0))
        self._copies: dict[int, _Copy] = {}
        self._used: set[int] = set()
        # The arrays that the copying stream still reads or writes: freed memory would be reused at once.
        self._in_flight: list[Any] = []
        # After the last kernel that reads shared memory.
        self._reading: Any = None
        # Blocks of the server's device memory by handle, opened and checked; those to close after this run; arrays in
        # them; whether this run has got any, because any of its kernels may still use them.
        self._opened: dict[bytes, int] = {}
        self._closing: list[int] = []
        self._imports: dict[DevicePlace, Any] = {}
        self._shows_imports = False
        self._has_said: set[str] = set()

    def begin_run(self, parameters: Parameters) -> None:
        """Become the current device again, whatever the last function did, and update the variables that it read."""
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
                del old  # the new one may take its memory
                if not is_staged:  # copies on this device are fast, and the place may have to be asked for
                    continue
                try:
                    self._start_copy(number, parameters, None)
                except DeviceMemoryError:  # the next read raises, if it does not fit then either
                    return

    # --- random numbers -------------------------------------------------------------------------------------------

    def seed(self, number: int) -> None:
        random = self.array_module.random
        for place, device in enumerate(self._numbers):
            with self.array_module.cuda.Device(device):
                random.seed((number + place) % 2**32)

    def generator(self, bits: np.random.Philox) -> Any:
        random = self.array_module.random
        with self._home:
            return random.Generator(random.Philox4x3210(int(bits.random_raw())))

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

    def restore(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._copies.pop(number, None)

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
                memory = cupy.cuda.UnownedMemory(address_of(host), host.nbytes, host, self._home.id)
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
        """The server's array on this device. None if its memory cannot be opened or, with ``is_mirror``, if it differs
        from ``like``, the mirror."""
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
        """The address of a block of the server in this process. 0 if it cannot be opened, or if its ends do not have
        the bytes that the server has written there, because a driver may open a larger allocation."""
        if place.handle not in self._opened:
            self._opened[place.handle] = 0
            runtime = self.array_module.cuda.runtime
            mark = np.frombuffer(place.mark, np.uint8)
            try:
                with self._home:
                    start = runtime.ipcOpenMemHandle(place.handle)
                    try:
                        is_it = all(self._shows(start + offset, mark) for offset in place.marked)
                    except runtime.CUDARuntimeError:  # the allocation ends before it
                        is_it = False
                    if not is_it:
                        runtime.ipcCloseMemHandle(start)
                        start = 0
            except runtime.CUDARuntimeError as error:
                # Only the text: an error object in a log would keep memory alive through its frames.
                self._say(f"transport staging: the server's memory on {self.name} cannot be opened ({error!s})")
            else:
                self._opened[place.handle] = start
                if not start:
                    self._say_other_bytes()
        return self._opened[place.handle]

    def _shows(self, address: int, expected: np.ndarray) -> bool:
        """Whether the memory at this device address holds these bytes, uint8 [n]."""
        runtime, seen = self.array_module.cuda.runtime, np.empty_like(expected)
        with self._home:
            runtime.memcpy(address_of(seen), address, seen.nbytes, runtime.memcpyDeviceToHost)
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
        """The array; all later computations wait until it is complete."""
        if copy.event is not None:
            if copy.event.done:
                copy.event = None
            else:
                with self._home:
                    self.array_module.cuda.get_current_stream().wait_event(copy.event)
        return copy.array

    def _start_copy(self, number: int, parameters: Parameters, imported: Any) -> _Copy:
        """Copy the variable from ``imported``, or from host memory if that is None."""
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
                # The memory may have belonged to an array that kernels of this stream still use.
                self._copying.wait_event(self.array_module.cuda.get_current_stream().record())
                kind = self.array_module.cuda.runtime.memcpyHostToDevice
                self._copy(array.data.ptr, address_of(host), host, kind)
                event = self._copying.record()
                self._in_flight.append(array)
        copy = self._copies[number] = _Copy(version, array, event, imported is None)
        return copy

    def _copy(self, target: int, source: int, host: np.ndarray, kind: int) -> None:
        """Enqueue a copy between two addresses, one of which is that of ``host``."""
        for start, stop in self._locks.parts(address_of(host), host.nbytes):
            self.array_module.cuda.runtime.memcpyAsync(
                target + start, source + start, stop - start, kind, self._copying.ptr
            )

    def _empty(self, like: np.ndarray) -> Any:
        cupy = self.array_module
        try:
            return cupy.empty(like.shape, like.dtype)
        except cupy.cuda.memory.OutOfMemoryError:
            # Copies that this run has not read are only a cache, so they are dropped when memory is short.
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
                # If a gradient lies in the buffer of another variable, it is saved before that buffer is overwritten.
                found.append((array.copy() if low <= array.data.ptr < high else array, target))
            for array, target in found:
                target[...] = array

    def fetch(self, pairs: Sequence[tuple[Any, np.ndarray]], *, may_change: bool) -> None:
        cupy = self.array_module
        nbytes = sum(source.nbytes for source, _ in pairs)
        with self._home:
            arrays = counted(len(pairs), "array")
            with self._memory(nbytes, f"contiguous copies of {arrays} on their way to the server"):
                found = [(cupy.ascontiguousarray(self._at_home(source)), target) for source, target in pairs]
            current = cupy.cuda.get_current_stream()
            self._copying.wait_event(current.record())
            for array, target in found:
                self._copy(address_of(target), array.data.ptr, target, cupy.cuda.runtime.memcpyDeviceToHost)
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
        """If the memory does not suffice, raise an error that names the device and the use."""
        try:
            yield
        except self.array_module.cuda.memory.OutOfMemoryError as error:
            copies = [copy.array.nbytes for copy in self._copies.values()]
            raise _too_small(
                self.array_module,
                self.name,
                nbytes,
                what,
                f"; copies of {counted(len(copies), 'variable')} take {sum(copies)} bytes. Take rows of a large table "
                "(cs.nn.embedding_lookup) instead of the whole, or smaller batches",
            ) from error


def can_be_on(array: Any) -> bool:
    """Whether a GPU can hold arrays of this dtype; strings stay in host memory."""
    return getattr(array.dtype, "kind", "f") in "biufc"


def place(cupy: Any, array: Any, number: int, name: str) -> Any:
    """``array`` on the device with CUDA's ``number``; ``array`` itself if it is there already.

    Raises CuPy's errors if the device cannot be used, :class:`DeviceMemoryError` if its memory does not suffice.
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
        f"{name}: {nbytes} bytes are needed for {what}, but {free} of {total} bytes are free (CuPy's pool may hold "
        f"more){plan}"
    )


def _bounds(array: np.ndarray) -> tuple[int, int]:
    return address_of(array), address_of(array) + array.nbytes
