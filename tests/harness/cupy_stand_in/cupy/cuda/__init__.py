"""Devices, streams, events and memory."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy import _machine
from cupy._machine import OutOfMemoryError

from . import compiler as compiler
from . import driver as driver
from . import runtime

_numbers = itertools.count(1)
#: By the number that stands for the handle.
_streams: weakref.WeakValueDictionary[int, _machine.Queue] = weakref.WeakValueDictionary()


class Device:
    """A GPU by number; the current one without. In a ``with`` block it is current."""

    def __init__(self, device: Any = None) -> None:
        self.id = _machine.here.device if device is None else int(getattr(device, "id", device))
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        self._before.append(_machine.here.device)
        self.use()
        return self

    def __exit__(self, *of_error: object) -> None:
        _machine.here.device = self._before.pop()

    def use(self) -> None:
        _machine.set_device(self.id)

    def synchronize(self) -> None:
        with self:
            runtime.deviceSynchronize()

    @property
    def mem_info(self) -> tuple[int, int]:
        with self:
            return runtime.memGetInfo()

    @property
    def attributes(self) -> dict[str, int]:
        _machine._find(self.id)
        return {
            "CanUseHostPointerForRegisteredMem": 1,
            "HostRegisterSupported": 1,
            "HostRegisterReadOnlySupported": 1,
            "MultiProcessorCount": 4,
        }

    @property
    def compute_capability(self) -> str:
        return "90"

    @property
    def pci_bus_id(self) -> str:
        return runtime.deviceGetPCIBusId(self.id)


class Stream:
    """A queue of work of the current device. In a ``with`` block it is current."""

    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        device = None if null else _machine.gpu()
        self._queue = None if device is None else _machine.Queue(device, non_blocking=non_blocking)
        self.ptr = 0 if null else next(_numbers)
        if self._queue is not None:
            _streams[self.ptr] = self._queue
        self._before: list[tuple[int, _machine.Queue | None]] = []

    @property
    def queue(self) -> _machine.Queue:
        """What the machine knows it by. Not CuPy's."""
        return _machine.gpu().null if self._queue is None else self._queue

    def __enter__(self) -> Stream:
        device = _machine.here.device
        self._before.append((device, _machine.here.streams.get(device)))
        self.use()
        return self

    def __exit__(self, *of_error: object) -> None:
        device, before = self._before.pop()
        _machine.here.streams.pop(device, None)
        if before is not None:
            _machine.here.streams[device] = before

    def use(self) -> Stream:
        queue = self.queue
        if queue.gpu.number != _machine.here.device:
            raise runtime.CUDARuntimeError(_machine.INVALID_VALUE, "the stream is another device's")
        _machine.here.streams[queue.gpu.number] = queue
        return self

    @property
    def done(self) -> bool:
        return self.queue.done == self.queue.put

    def synchronize(self) -> None:
        self.queue.run()

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event._at is not None:
            self.queue.wait_for(*event._at)

    def launch_host_func(self, callback: Callable[[Any], None], arg: Any) -> None:
        self.queue.add(lambda: callback(arg))


Stream.null = Stream(null=True)


class _Current(Stream):
    def __init__(self, queue: _machine.Queue) -> None:
        self._queue = queue
        self.ptr = next((ptr for ptr, found in _streams.items() if found is queue), 0)
        self._before = []


def get_current_stream(device_id: int = -1) -> Stream:
    """The current stream of a device, by default the current one."""
    if device_id < 0:
        return _Current(_machine.current())
    return _Current(_machine.here.streams.get(device_id) or _machine.gpu(device_id).null)


class Event:
    """A place in a stream's queue."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        _machine.gpu()
        self._at: tuple[_machine.Queue, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        queue = _machine.current() if stream is None else stream.queue
        with _machine.lock:
            self._at = queue, queue.put

    def synchronize(self) -> None:
        if self._at is not None:
            self._at[0].run(self._at[1])

    @property
    def done(self) -> bool:
        return self._at is None or self._at[0].done >= self._at[1]


# --- memory ---------------------------------------------------------------------------------------------------------


class BaseMemory:
    """A range of memory that arrays may lie in: ``ptr``, ``size`` bytes, of GPU ``device_id``."""

    ptr: int
    size: int
    device_id: int

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class Memory(BaseMemory):
    """Memory of its own on the current device, given back when nobody holds it."""

    _is_plain = True

    def __init__(self, size: int) -> None:
        block = _machine.allocate(size, is_plain=self._is_plain)
        self.ptr, self.size, self.device_id = block.start, size, block.gpu.number
        weakref.finalize(self, _machine.release, block.start).atexit = False


class PooledMemory(Memory):
    """As Memory, out of the pool: no other process can open it."""

    _is_plain = False


class UnownedMemory(BaseMemory):
    """Memory of somebody else: device memory, opened memory, page-locked host memory."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        if device_id < 0:
            block = _machine.block_at(ptr, size)
            if block is None:
                raise runtime.CUDARuntimeError(_machine.INVALID_VALUE)
            device_id = block.gpu.number
        self.ptr, self.size, self.device_id, self._owner = ptr, size, device_id, owner


class MemoryPointer:
    """A place in a memory."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    @property
    def device(self) -> Device:
        return self.mem.device

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def copy_from_device(self, src: MemoryPointer, size: int) -> None:
        runtime.memcpyAsync(self.ptr, src.ptr, size, runtime.memcpyDeviceToDevice, get_current_stream().ptr)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Stream | None = None) -> None:
        _machine.copy(self.ptr, src.ptr, size, _queue(stream))

    def copy_from_host(self, mem: Any, size: int) -> None:
        _machine.copy(self.ptr, _address(mem), size, None)

    def copy_from_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        _machine.copy(self.ptr, _address(mem), size, _queue(stream))

    def copy_to_host(self, mem: Any, size: int) -> None:
        _machine.copy(_address(mem), self.ptr, size, None)

    def copy_to_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        _machine.copy(_address(mem), self.ptr, size, _queue(stream))

    def memset(self, value: int, size: int) -> None:
        runtime.memset(self.ptr, value, size)

    def memset_async(self, value: int, size: int, stream: Stream | None = None) -> None:
        _queue(stream).add(lambda: _machine.memory_at(self.ptr, size).fill(value))


def _queue(stream: Stream | None) -> _machine.Queue:
    return _machine.current() if stream is None else stream.queue


def _address(mem: Any) -> int:
    return int(getattr(mem, "value", mem))  # a ctypes.c_void_p or an int


def _pool(size: int) -> MemoryPointer:
    return MemoryPointer(PooledMemory(size), 0)


_allocator: Callable[[int], MemoryPointer] = _pool


def alloc(size: int) -> MemoryPointer:
    """Memory by the allocator of arrays."""
    return _allocator(size)


def set_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> None:
    """Set the allocator of arrays; None: plain memory."""
    global _allocator
    _allocator = allocator or (lambda size: MemoryPointer(Memory(size), 0))


def is_available() -> bool:
    return bool(_machine.gpus)


def get_device_id() -> int:
    return _machine.here.device


def pinned(array: np.ndarray) -> bool:
    """Whether a host array is page-locked. Not CuPy's."""
    return _machine.locked_at(array.ctypes.data, array.nbytes) is not None


memory = types.SimpleNamespace(
    OutOfMemoryError=OutOfMemoryError,
    MemoryPointer=MemoryPointer,
    Memory=Memory,
    UnownedMemory=UnownedMemory,
    alloc=alloc,
)
stream = types.SimpleNamespace(Stream=Stream, Event=Event, get_current_stream=get_current_stream)
