"""Kernels given as source: run by the processor, when their stream comes to them. They need gcc."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import c_kernels

from . import _machine

_loaded: set[tuple[str, str]] = set()


class RawModule:
    """As CuPy's: compiled when the first kernel is asked for. The driver loads each kernel when it is first asked for,
    where the GPU has memory left."""

    def __init__(self, *, code: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        if "-fmad=false" not in options:
            raise ValueError("the stand-in does not contract; say -fmad=false")
        self._code = code

    def get_function(self, name: str) -> RawKernel:
        try:
            kernel = c_kernels.compiled(self._code)[name]
        except RuntimeError as error:
            raise _machine.CompileException(str(error)) from error
        device = _machine.gpu()
        if (self._code, name) not in _loaded and device.nbytes - device.allocated < _machine.KERNEL_NBYTES:
            raise _machine.CUDADriverError(_machine.OUT_OF_MEMORY)
        _loaded.add((self._code, name))
        return RawKernel(kernel)


class RawKernel:
    """One kernel. A pointer is an array or the address of device memory or of page-locked memory."""

    def __init__(self, kernel: c_kernels.Kernel) -> None:
        self._kernel = kernel

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        if not 0 < block[0] <= 1024 or not 0 < grid[0] < 1 << 31:
            raise _machine.CUDARuntimeError(_machine.INVALID_VALUE)
        plain = [arg.data.ptr if hasattr(arg, "data") and hasattr(arg.data, "ptr") else arg for arg in args]
        for is_pointer, arg in zip(self._kernel.is_pointer, plain, strict=True):
            if is_pointer:
                _machine.memory_at(arg, 1)
        _machine.account.add("launches", 1)
        _machine.current().add(lambda: self._kernel((grid[0],), (block[0],), plain))
