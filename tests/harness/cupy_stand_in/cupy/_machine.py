"""The machine behind the stand-in: GPUs with memory of their own, streams that put everything off, and an account.

The GPUs are those of the fake driver directory that ``CS_NVIDIA_DRIVER`` names (``stand_in_gpus.py`` makes one), as far
as CUDA_VISIBLE_DEVICES shows them. A device pointer is the address of ordinary memory, so that a kernel compiled as C
can be given it; that memory is *separate* because nothing else reads or writes it: arrays refuse what CuPy refuses,
and every access is checked against what is allocated, page-locked or opened.

All work is put into the queue of its stream and carried out when somebody waits for it: the host for a stream, an event
or a device, or another stream for an event. Forgotten waiting gives the bytes that stood there before, which in new
device memory are 0x7F: no number anybody expects. Work on the null stream waits for all streams but those made
``non_blocking``, and these for it, as in CUDA.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import re
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

lock = threading.RLock()

#: What each process counts, in this order, in its file of the account; ``contexts`` has a bit for each GPU.
COUNTERS = (
    "contexts",
    "host_to_device",
    "host_to_device_nbytes",
    "device_to_host",
    "device_to_host_nbytes",
    "device_to_device",
    "device_to_device_nbytes",
    "host_reads_nbytes",
    "launches",
    "allocated_nbytes",
    "page_locked_nbytes",
    "exported",
    "opened",
)

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE = 0, 1, 2, 101
ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED, NO_DEVICE, NOT_SUPPORTED = 700, 712, 713, 100, 801
_MESSAGES = {
    INVALID_VALUE: "cudaErrorInvalidValue: invalid argument",
    OUT_OF_MEMORY: "cudaErrorMemoryAllocation: out of memory",
    NO_DEVICE: "cudaErrorNoDevice: no CUDA-capable device is detected",
    INVALID_DEVICE: "cudaErrorInvalidDevice: invalid device ordinal",
    ILLEGAL_ADDRESS: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    ALREADY_REGISTERED: "cudaErrorHostMemoryAlreadyRegistered: part or all of the range is already registered",
    NOT_REGISTERED: "cudaErrorHostMemoryNotRegistered: pointer does not correspond to a registered memory region",
    NOT_SUPPORTED: "cudaErrorNotSupported: operation not supported",
}

READ_ONLY = 8
#: What must be free on a GPU where a kernel is loaded.
KERNEL_NBYTES = 64 << 10
_POISON = 0x7F
_ALIGNMENT = 512
_UUID = re.compile(r"GPU UUID:\s*(\S+)")
_LIMIT = re.compile(r"Memory:\s*(\d+)")
_HANDLE = struct.Struct("<8sqqqq")


class CUDARuntimeError(RuntimeError):
    """As CuPy's: ``status`` is CUDA's number."""

    def __init__(self, status: int, detail: str = "") -> None:
        self.status = status
        super().__init__(f"{_MESSAGES[status]}{f' ({detail})' if detail else ''}")


class CUDADriverError(RuntimeError):
    """As CuPy's: ``status`` is CUDA's number."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__("CUDA_ERROR_OUT_OF_MEMORY: out of memory" if status == OUT_OF_MEMORY else str(status))


class CompileException(Exception):
    """As CuPy's."""


class OutOfMemoryError(MemoryError):
    """As CuPy's."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


# --- GPUs -----------------------------------------------------------------------------------------------------------


class Gpu:
    """One GPU that this process sees as ``number``; ``index`` is its number on the machine."""

    def __init__(self, number: int, index: int, uuid: str, nbytes: int) -> None:
        self.number, self.index, self.uuid, self.nbytes = number, index, uuid, nbytes
        self.allocated = 0
        self.has_context = False
        self.streams: weakref.WeakSet[Queue] = weakref.WeakSet()
        self.null = Queue(self, non_blocking=False)


def _visible() -> list[Gpu]:
    driver = Path(os.environ.get("CS_NVIDIA_DRIVER", "/nonexistent"))
    texts = [(gpu / "information").read_text() for gpu in sorted(driver.iterdir())] if driver.is_dir() else []
    uuids = [match[1] if (match := _UUID.search(text)) else "" for text in texts]
    limits = [int(match[1]) if (match := _LIMIT.search(text)) else 1 << 30 for text in texts]
    chosen = list(range(len(texts)))
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        chosen = []
        for entry in (part.strip() for part in visible.split(",")):
            found = (
                [int(entry)] if entry.isdecimal() else [i for i, u in enumerate(uuids) if entry and u.startswith(entry)]
            )
            if len(found) != 1 or found[0] >= len(uuids):
                break
            chosen += found
    return [Gpu(number, index, uuids[index], limits[index]) for number, index in enumerate(chosen)]


class _Here(threading.local):
    """What is current in this thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Queue] = {}


here = _Here()


def gpu(number: int | None = None) -> Gpu:
    """The GPU called ``number``, or the current one, with a context of this process from now on."""
    found = _find(here.device if number is None else number)
    if not found.has_context:
        found.has_context = True
        account.values[0] |= 1 << found.index
    return found


def _find(number: int) -> Gpu:
    if not gpus:
        raise CUDARuntimeError(NO_DEVICE)
    if not 0 <= number < len(gpus):
        raise CUDARuntimeError(INVALID_DEVICE)
    return gpus[number]


def set_device(number: int) -> None:
    """Make a GPU current in this thread; this makes its context."""
    here.device = gpu(number).number


# --- the account ----------------------------------------------------------------------------------------------------


class _Account:
    """What this process has done, in a file that the tests read while it runs and after it."""

    def __init__(self) -> None:
        self.values = np.zeros(len(COUNTERS), np.uint64)
        self._places = {name: place for place, name in enumerate(COUNTERS)}
        driver = os.environ.get("CS_NVIDIA_DRIVER")
        if driver is not None:
            directory = Path(driver).with_name("processes")
            directory.mkdir(exist_ok=True)
            path = directory / str(os.getpid())
            path.write_bytes(self.values.tobytes())
            self.values = np.memmap(path, np.uint64, "r+")

    def add(self, name: str, amount: int) -> None:
        place = self._places[name]
        self.values[place] = int(self.values[place]) + amount


def counts() -> dict[str, int]:
    """What this process has counted so far."""
    return dict(zip(COUNTERS, map(int, account.values), strict=True))


# --- streams --------------------------------------------------------------------------------------------------------


class Queue:
    """The work of one stream, in order."""

    def __init__(self, gpu: Gpu, *, non_blocking: bool) -> None:
        self.gpu, self.non_blocking = gpu, non_blocking
        self.put = self.done = 0
        self._work: deque[Callable[[], None]] = deque()
        self._running = False
        gpu.streams.add(self)

    def add(self, work: Callable[[], None]) -> None:
        """Put off ``work`` until somebody waits for it."""
        with lock:
            self._order()
            self._work.append(work)
            self.put += 1

    def wait_for(self, other: Queue, count: int) -> None:
        """What is put in from now on comes after the first ``count`` pieces of ``other``."""
        with lock:
            self._work.append(lambda: other.run(count))
            self.put += 1

    def run(self, count: int | None = None) -> None:
        """Carry out the first ``count`` pieces of work, by default all."""
        with lock:
            count = self.put if count is None else count
            while self.done < count and self._work:
                work = self._work.popleft()
                self.done += 1
                work()

    def _order(self) -> None:
        """The null stream and the streams that are not non-blocking wait for each other."""
        null = getattr(self.gpu, "null", self)
        others = [null] if self is not null else [s for s in self.gpu.streams if s is not self]
        if self.non_blocking:
            return
        for other in others:
            if not other.non_blocking and other._work:
                self.wait_for(other, other.put)


def current() -> Queue:
    """The stream that is current in this thread for the current GPU."""
    device = gpu()
    return here.streams.get(device.number) or device.null


def settle() -> Queue:
    """The current stream, with all its work done: what is computed now sees what is ordered before it and no more."""
    stream = current()
    with lock:
        stream._order()
        stream.run()
    return stream


# --- memory ---------------------------------------------------------------------------------------------------------


class Block:
    """Memory of one GPU. ``is_plain``: from cudaMalloc itself, so another process can open it."""

    def __init__(self, gpu: Gpu, nbytes: int, *, is_plain: bool = False, opened: int | None = None) -> None:
        self.gpu, self.nbytes, self.descriptor = gpu, nbytes, opened
        self.queue = current()
        if is_plain:
            self.descriptor = os.memfd_create("device", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, max(nbytes, 1))
        if self.descriptor is not None:
            self._memory: Any = mmap.mmap(self.descriptor, max(nbytes, 1))
            space = np.frombuffer(self._memory, np.uint8)
        else:
            self._memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
            skip = -self._memory.ctypes.data % _ALIGNMENT
            space = self._memory[skip : skip + nbytes + 1]
        self.bytes = space[:nbytes]
        self.start = space.ctypes.data
        if opened is None:
            self.bytes[:] = _POISON


_blocks: dict[int, Block] = {}
_starts: list[int] = []
_locked: dict[int, tuple[int, int]] = {}  # start: end, flags


def allocate(nbytes: int, *, is_plain: bool = False) -> Block:
    """New memory on the current GPU. Raises OutOfMemoryError where less is free."""
    device = gpu()
    with lock:
        if device.allocated + nbytes > device.nbytes:
            if is_plain:
                raise CUDARuntimeError(OUT_OF_MEMORY)
            raise OutOfMemoryError(nbytes, device.allocated)
        block = Block(device, nbytes, is_plain=is_plain)
        device.allocated += nbytes
        account.add("allocated_nbytes", nbytes)
        _note(block)
    return block


def _note(block: Block) -> None:
    _blocks[block.start] = block
    bisect.insort(_starts, block.start)


def release(start: int) -> None:
    """Give memory back; what is under way on its GPU is finished first, as cudaFree does."""
    with lock:
        block = _blocks.pop(start, None)
        if block is None:
            raise CUDARuntimeError(INVALID_VALUE)
        _starts.remove(start)
        if block.descriptor is not None:
            for stream in list(block.gpu.streams):
                stream.run()
            os.close(block.descriptor)
        block.gpu.allocated -= block.nbytes
        account.add("allocated_nbytes", -block.nbytes)


def block_at(address: int, nbytes: int = 0) -> Block | None:
    """The device memory in which these bytes lie, if they do."""
    with lock:
        place = bisect.bisect_right(_starts, address) - 1
        if place < 0:
            return None
        block = _blocks[_starts[place]]
        return block if address + max(nbytes, 1) <= block.start + max(block.nbytes, 1) else None


def locked_at(address: int, nbytes: int) -> tuple[int, int] | None:
    """(start, flags) of the page-locked range in which these bytes lie wholly, if they do."""
    with lock:
        for start, (end, flags) in _locked.items():
            if start <= address and address + nbytes <= end:
                return start, flags
    return None


def memory_at(address: int, nbytes: int) -> np.ndarray:
    """uint8[nbytes] of device memory, or of page-locked host memory. Raises for any other address."""
    block = block_at(address, nbytes)
    if block is not None:
        return block.bytes[address - block.start : address - block.start + nbytes]
    flags, stop = 0, address
    while stop < address + max(nbytes, 1):  # across any number of ranges
        locked = locked_at(stop, 1)
        if locked is None:
            raise CUDARuntimeError(ILLEGAL_ADDRESS)
        flags |= locked[1]
        stop = _locked[locked[0]][0]
    return host_at(address, nbytes, writable=not flags & READ_ONLY)


def host_at(address: int, nbytes: int, *, writable: bool) -> np.ndarray:
    """uint8[nbytes] of this process's memory, wherever it is."""
    found = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
    found.flags.writeable = writable
    return found


def page_lock(address: int, nbytes: int, flags: int) -> None:
    """Page-lock host memory. A mapping that may not be written must be said to be READ_ONLY."""
    gpu()
    end = address + nbytes
    with lock:
        if nbytes <= 0 or (not flags & READ_ONLY and not _is_writable(address, end)):
            raise CUDARuntimeError(INVALID_VALUE)
        if any(start < end and address < other for start, (other, _) in _locked.items()):
            raise CUDARuntimeError(ALREADY_REGISTERED)
        _locked[address] = (end, flags)
        account.add("page_locked_nbytes", nbytes)


def page_unlock(address: int) -> None:
    """Undo :func:`page_lock` of exactly this address."""
    gpu()
    with lock:
        found = _locked.pop(address, None)
        if found is None:
            raise CUDARuntimeError(NOT_REGISTERED)
        account.add("page_locked_nbytes", address - found[0])


def _is_writable(address: int, end: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, *_ = line.split(None, 2)
        low, high = (int(part, 16) for part in bounds.split("-"))
        if low <= address < high:
            if permissions[1] != "w":
                return False
            address = high
            if address >= end:
                return True
    return False


def copy(target: int, source: int, nbytes: int, stream: Queue | None) -> None:
    """cudaMemcpy (``stream`` None) or cudaMemcpyAsync of bytes between any two places.

    An asynchronous copy from pageable memory has read it, one to pageable memory has written it, when the call
    returns; of page-locked memory that happens when the stream comes to it.
    """
    if nbytes == 0:
        return
    queue = current() if stream is None else stream
    ends = _End(source, nbytes, queue), _End(target, nbytes, queue)
    kind = {(False, True): "host_to_device", (True, False): "device_to_host", (True, True): "device_to_device"}
    name = kind.get((ends[0].block is not None, ends[1].block is not None))
    if name is not None:
        account.add(name, 1)
        account.add(f"{name}_nbytes", nbytes)
    read = ends[0].memory(writable=False).copy() if ends[0].is_pageable else None

    def carry_out() -> None:
        np.copyto(ends[1].memory(writable=True), ends[0].memory(writable=False) if read is None else read)

    queue.add(carry_out)
    if stream is None or ends[1].is_pageable:
        queue.run()


class _End:
    """One end of a copy that is carried out later. Device memory that was given back meanwhile may be used by the
    stream on which it was allocated alone: there, whoever gets it next comes later."""

    def __init__(self, address: int, nbytes: int, queue: Queue) -> None:
        self._address, self._nbytes, self._queue = address, nbytes, queue
        self.block = block_at(address, nbytes)
        self.is_pageable = self.block is None and locked_at(address, nbytes) is None
        ends_outside = self.block is None and block_at(address, 1) is not None
        if ends_outside or (self.is_pageable and _touches_locked(address, nbytes)):
            raise CUDARuntimeError(INVALID_VALUE)

    def memory(self, *, writable: bool) -> np.ndarray:
        if self.is_pageable:
            return host_at(self._address, self._nbytes, writable=writable)
        if self.block is None:
            return memory_at(self._address, self._nbytes)
        if _blocks.get(self.block.start) is not self.block and self._queue is not self.block.queue:
            raise CUDARuntimeError(ILLEGAL_ADDRESS, "given back while another stream used it")
        place = self._address - self.block.start
        return self.block.bytes[place : place + self._nbytes]


def _touches_locked(address: int, nbytes: int) -> bool:
    return any(start < address + nbytes and address < end for start, (end, _) in _locked.items())


# --- between processes ----------------------------------------------------------------------------------------------


def export(address: int) -> bytes:
    """The handle of the plain allocation that begins at ``address``, 64 bytes."""
    block = _blocks.get(address)
    if block is None or block.descriptor is None:
        raise CUDARuntimeError(INVALID_VALUE)  # of a pool: its handle would give away all of the pool's memory
    account.add("exported", 1)
    return _HANDLE.pack(b"stand-in", os.getpid(), block.descriptor, block.nbytes, block.gpu.index).ljust(64, b"\0")


def open_handle(handle: bytes) -> int:
    """Where the allocation behind a handle of another process begins in this one."""
    device = gpu()
    mark, pid, descriptor, nbytes, index = _HANDLE.unpack_from(handle)
    if mark != b"stand-in" or pid == os.getpid() or index != device.index:
        raise CUDARuntimeError(INVALID_VALUE)  # the process itself may not open it, nor another GPU
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CUDARuntimeError(INVALID_VALUE) from error
    with lock:
        block = Block(device, nbytes, opened=opened)
        device.allocated += nbytes  # given back by release
        account.add("allocated_nbytes", nbytes)
        account.add("opened", 1)
        _note(block)
    return block.start


account = _Account()
gpus = _visible()
