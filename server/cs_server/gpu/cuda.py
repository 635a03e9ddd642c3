"""A GPU as the server uses it: memory, copies, page-locked host memory, kernels.

This is the only module of the server that imports CuPy. `store` imports it, and only for variables on a GPU, so a
server whose variables lie in host memory never has a CUDA context. It knows no variables and no rules.

Two streams order all work. Kernels and copies to the GPU follow each other on the first. Copies from the GPU follow on
the second, after a :meth:`Gpu.mark` of the first, so that they run while the next kernel runs.
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
from cs_runtime.shared_memory.page_locks import PageLocks

from .codegen import THREADS

__all__ = ["Block", "Gpu"]

_log = logging.getLogger("cs_server.service")

# Seconds between two attempts to allocate memory that is not free yet.
_PAUSE = 0.1
# CUDA_ERROR_OUT_OF_MEMORY of the driver, cudaErrorMemoryAllocation of the runtime.
_OUT_OF_MEMORY = 2
# Events are made at the start, because a commit allocates nothing. Reusing an event only makes a copy wait for longer.
_MARKS = 64

T = TypeVar("T")


class Block:
    """Plain memory of a GPU, not from a pool, so that it can be shared with another process."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.address: int = memory.ptr
        self.nbytes: int = memory.size

    def free(self) -> None:
        """Free the memory now."""
        self._memory = None


class Gpu:
    """One GPU, which is current in the thread that makes this object. Only that thread may use it."""

    def __init__(self, name: str) -> None:
        """``name`` is like ``gpu:0``. Raises :class:`DeviceError` if CuPy is missing or cannot use it."""
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
            #: Sixteen bytes that identify the GPU.
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
        """Bytes of the GPU that are free."""
        return int(self._runtime.memGetInfo()[0])

    def allocate(self, nbytes: int, until: float = 0.0) -> Block:
        """New memory, which is freed with its block. If there is too little, try again until this time of
        :func:`time.monotonic`. Raises :class:`DeviceMemoryError`."""
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
        """The handle with which another process opens the block. Raises DeviceError if the driver exports none."""
        try:
            return bytes(self._runtime.ipcGetMemHandle(block.address))
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"memory of {self.name} cannot be exported by CUDA IPC ({error})") from error

    def zero(self, address: int, nbytes: int) -> None:
        """Set bytes to 0. Raises DeviceMemoryError if the driver has no memory left to do it."""
        if nbytes:
            stream = self._kernels_stream.ptr
            self._with_memory("zeros", 0.0, lambda: self._runtime.memsetAsync(address, 0, nbytes, stream))

    # --- copies -------------------------------------------------------------------------------------------------------

    def bring(self, address: int, values: np.ndarray) -> None:
        """Copy a contiguous array to the GPU. If it is page-locked, it must not change until :meth:`wait`."""
        kind, stream = self._runtime.memcpyHostToDevice, self._kernels_stream.ptr
        source = values.ctypes.data
        for start, stop in self._locks.parts(source, values.nbytes):
            self._runtime.memcpyAsync(address + start, source + start, stop - start, kind, stream)

    def take(self, values: np.ndarray, address: int, mark: Any) -> None:
        """Copy from the GPU to a contiguous array, after ``mark``; the copy is complete after :meth:`wait`."""
        kind, stream = self._runtime.memcpyDeviceToHost, self._copies_stream
        stream.wait_event(mark)
        target = values.ctypes.data
        for start, stop in self._locks.parts(target, values.nbytes):
            self._runtime.memcpyAsync(target + start, address + start, stop - start, kind, stream.ptr)

    def mark(self) -> Any:
        """A mark after all kernels and copies so far. After many more marks it stands for a later point."""
        event = next(self._marks)
        event.record(self._kernels_stream)
        return event

    def wait(self) -> None:
        """Wait until all kernels and copies are done."""
        self._kernels_stream.synchronize()
        self._copies_stream.synchronize()

    # --- page-locked memory -------------------------------------------------------------------------------------------

    def page_lock(self, start: int, stop: int) -> bool:
        """Page-lock host memory between two addresses; returns whether a kernel may now read it in place."""
        return self._locks.lock([(start, stop)]) and self._maps_host

    def page_unlock(self, start: int, stop: int) -> None:
        """Unlock every range that overlaps these addresses, whose pages are about to be given back."""
        self._locks.unlock(start, stop)

    def _say_refusal(self, reason: str) -> None:
        _log.warning("transport pageable memory: %s; copies to and from %s are slower", reason, self.name)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def load(self, source: str, name: str, arguments: Sequence[Any], until: float = 0.0) -> None:
        """Prepare a kernel, so that no later launch compiles, loads or allocates anything.

        The driver loads a kernel at its first use and may allocate a stack at its first launch. So it is launched
        here, with one block and with ``arguments`` (as in :meth:`launch`) that leave it nothing to do. Raises
        DeviceMemoryError if the GPU is full until that time (:meth:`allocate`), DeviceError if it refuses the kernel.
        """

        def attempt() -> Any:
            # Without contraction an update has the same bits as the reference.
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
        """Launch a kernel that has been loaded. An ``int`` is an address."""
        kernel = self._kernels[source, name]
        with self._kernels_stream:
            kernel((blocks,), (THREADS,), tuple(arguments))

    def close(self) -> None:
        """Wait for all work and unlock the host memory."""
        self.wait()
        self._locks.close()
