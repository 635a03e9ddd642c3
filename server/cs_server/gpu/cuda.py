"""A GPU as the server uses it: memory, copies, page-locked memory of the machine, kernels.

The one module of the server that knows CuPy, imported by `store` for variables on a GPU alone: a server whose
variables lie in the machine's memory never has a CUDA context. It knows no variables and no rules.

Everything is ordered by two streams. Kernels and what is brought to the GPU follow each other on one; what is taken
from it follows on the other, behind a :meth:`Gpu.mark` of the first, so that it is copied while the next kernel runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, TypeVar

import numpy as np

from cs_proto.errors import DeviceError, DeviceMemoryError
from cs_runtime.gpus import local_number, require_cupy
from cs_runtime.page_locks import PageLocks

from .codegen import THREADS

__all__ = ["Block", "Gpu"]

_log = logging.getLogger("cs_server.service")

# Memory that is not there yet is asked for again after so many seconds.
_PAUSE = 0.1
# CUDA_ERROR_OUT_OF_MEMORY of the driver, cudaErrorMemoryAllocation of the runtime.
_OUT_OF_MEMORY = 2
# Events are made at the start: a commit allocates nothing. One that is taken again only has a copy wait for more.
_MARKS = 64

T = TypeVar("T")


class Block:
    """Plain memory of a GPU, not from a pool, so that another process can be given it."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.address: int = memory.ptr
        self.nbytes: int = memory.size

    def free(self) -> None:
        """Give it back now."""
        self._memory = None


class Gpu:
    """One GPU, current in the thread that makes this object and is the only one to use it."""

    def __init__(self, name: str) -> None:
        """``name`` as ``gpu:0``. Raises :class:`DeviceError` where CuPy is missing or cannot use it."""
        try:
            import cupy
        except ImportError as error:
            require_cupy([name])
            raise DeviceError(f"CuPy, which {name} needs, cannot be imported: {error}") from error
        self.name = name
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        number = local_number(name)
        try:
            cupy.cuda.Device(number).use()
            self._kernels_stream = cupy.cuda.Stream(non_blocking=True)
            self._copies_stream = cupy.cuda.Stream(non_blocking=True)
            self._marks = cycle([cupy.cuda.Event(disable_timing=True) for _ in range(_MARKS)])
            #: Sixteen bytes that no other GPU has.
            self.uuid: bytes = bytes(self._runtime.getDeviceProperties(number)["uuid"][:16])
            self._maps_host = bool(
                self._runtime.deviceGetAttribute(self._runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, number)
            )
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"variables cannot be kept on {name}: {error}") from error
        self._kernels: dict[tuple[str, str], Any] = {}
        self._locks = PageLocks(self._runtime, self.wait, self._say_refusal)

    # --- memory -------------------------------------------------------------------------------------------------------

    def available_nbytes(self) -> int:
        """Bytes of the GPU that nobody has."""
        return int(self._runtime.memGetInfo()[0])

    def allocate(self, nbytes: int, until: float = 0.0) -> Block:
        """New memory, which is given back when nobody holds the block. Where there is too little it is tried again
        until that time of :func:`time.monotonic`. Raises :class:`DeviceMemoryError`."""
        return self._with_memory(f"{nbytes} bytes", until, lambda: Block(self._cupy.cuda.Memory(nbytes)))

    def _with_memory(self, what: str, until: float, attempt: Callable[[], T]) -> T:
        while True:
            try:
                return attempt()
            except (MemoryError, self._runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError) as error:
                if not isinstance(error, MemoryError) and error.status != _OUT_OF_MEMORY:
                    raise DeviceError(f"{self.name} cannot provide {what}: {error}") from error
                if time.monotonic() >= until:
                    raise DeviceMemoryError(
                        f"{what} planned on {self.name}, {self.available_nbytes()} bytes of it available ({error})"
                    ) from error
            time.sleep(_PAUSE)

    def handle(self, block: Block) -> bytes:
        """What another process opens the block with. Raises DeviceError where the driver exports none."""
        try:
            return bytes(self._runtime.ipcGetMemHandle(block.address))
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"memory of {self.name} cannot be exported by CUDA IPC ({error})") from error

    def zero(self, address: int, nbytes: int) -> None:
        """Set bytes to 0. Raises DeviceMemoryError where the driver has no memory left for what does it."""
        if nbytes:
            stream = self._kernels_stream.ptr
            self._with_memory("zeros", 0.0, lambda: self._runtime.memsetAsync(address, 0, nbytes, stream))

    # --- copies -------------------------------------------------------------------------------------------------------

    def bring(self, address: int, values: np.ndarray) -> None:
        """Copy a contiguous array to the GPU; it must stay as it is until :meth:`wait` where it is page-locked."""
        kind, stream = self._runtime.memcpyHostToDevice, self._kernels_stream.ptr
        source = values.ctypes.data
        for start, stop in self._locks.parts(source, values.nbytes):
            self._runtime.memcpyAsync(address + start, source + start, stop - start, kind, stream)

    def take(self, values: np.ndarray, address: int, mark: Any) -> None:
        """Copy from the GPU to a contiguous array, behind ``mark``; it is there after :meth:`wait`."""
        kind, stream = self._runtime.memcpyDeviceToHost, self._copies_stream
        stream.wait_event(mark)
        target = values.ctypes.data
        for start, stop in self._locks.parts(target, values.nbytes):
            self._runtime.memcpyAsync(target + start, address + start, stop - start, kind, stream.ptr)

    def mark(self) -> Any:
        """The point up to which kernels and copies have been ordered; after many more marks it is a later one."""
        event = next(self._marks)
        event.record(self._kernels_stream)
        return event

    def wait(self) -> None:
        """Return when everything ordered is done."""
        self._kernels_stream.synchronize()
        self._copies_stream.synchronize()

    # --- page-locked memory -------------------------------------------------------------------------------------------

    def page_lock(self, start: int, stop: int) -> bool:
        """Page-lock the machine's memory between two addresses; whether a kernel may now read it where it lies."""
        return self._locks.lock([(start, stop)]) and self._maps_host

    def page_unlock(self, start: int, stop: int) -> None:
        """Undo it for whatever overlaps these addresses: the pages are about to be given back."""
        self._locks.unlock(start, stop)

    def _say_refusal(self, reason: str) -> None:
        _log.warning("transport pageable memory: %s; copies to and from %s are slower", reason, self.name)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def load(self, source: str, name: str, arguments: Sequence[Any], until: float = 0.0) -> None:
        """Have a kernel ready: no launch of it compiles, loads or allocates anything afterwards.

        The driver loads a kernel when it is first asked for, and may give it a stack when it is first launched. So it
        is launched here, by one block, with ``arguments`` (as in :meth:`launch`) that leave it nothing to do. Raises
        DeviceMemoryError where the GPU is full until then (:meth:`allocate`), DeviceError where it does not take it.
        """

        def attempt() -> Any:
            # Without contraction an update has the bits of the reference.
            kernel = self._cupy.RawModule(code=source, options=("-fmad=false",)).get_function(name)
            with self._kernels_stream:
                kernel((1,), (THREADS,), tuple(arguments))
            self.wait()
            return kernel

        try:
            self._kernels[source, name] = self._with_memory(f"the kernel {name}", until, attempt)
        except self._cupy.cuda.compiler.CompileException as error:
            raise DeviceError(f"the kernel {name} cannot be compiled for {self.name}: {error}") from error

    def launch(self, source: str, name: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Order a kernel that has been loaded. An ``int`` is an address."""
        kernel = self._kernels[source, name]
        with self._kernels_stream:
            kernel((blocks,), (THREADS,), tuple(arguments))

    def close(self) -> None:
        """Wait for what is under way and unlock the machine's memory."""
        self.wait()
        self._locks.close()
