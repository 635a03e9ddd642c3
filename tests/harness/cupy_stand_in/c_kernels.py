"""Kernels of CUDA C run by the processor: compiled by gcc as plain C, every thread of a launch one after the other.

For kernels whose threads do not wait for each other. The source is taken as it is, so what a GPU would compile is what
is tested; only its few words of CUDA get a meaning in C.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["COMPILER", "Kernel", "compiled"]

COMPILER = shutil.which("gcc")

_PRELUDE = """\
#include <math.h>
#define __device__
#define __global__
static struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
"""
_LAUNCH = """
void launch_%(name)s(unsigned grid, unsigned block, %(parameters)s)
{
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
            %(name)s(%(arguments)s);
}
"""
_KERNEL = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')
# No contraction: -fmad=false. A load through a cast pointer is what CUDA allows.
_OPTIONS = ("-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
_UNUSED = ("-Wno-unused-function", "-Wno-int-to-pointer-cast")
_SCALARS: dict[str, type[ctypes._SimpleCData]] = {  # type: ignore[type-arg]
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


class Kernel:
    """One kernel. Called as CuPy's: a grid and a block of one dimension, and what the kernel takes; a pointer is an
    address."""

    def __init__(self, library: ctypes.CDLL, name: str, parameters: Sequence[str]) -> None:
        self.name = name
        self.is_pointer = ["*" in each for each in parameters]
        self._types = [ctypes.c_void_p if "*" in each else _SCALARS[each.rsplit(" ", 1)[0]] for each in parameters]
        self._launch = getattr(library, f"launch_{name}")
        self._launch.restype = None
        self._launch.argtypes = [ctypes.c_uint, ctypes.c_uint, *self._types]

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: Sequence[object]) -> None:
        """Run every thread; done when it returns."""
        if len(arguments) != len(self._types):
            raise TypeError(f"{self.name} takes {len(self._types)} arguments, not {len(arguments)}")
        plain: list[Any] = []
        for is_pointer, kind, argument in zip(self.is_pointer, self._types, arguments, strict=True):
            if not is_pointer:
                if not isinstance(argument, np.generic) or argument.nbytes != ctypes.sizeof(kind):
                    raise TypeError(f"{self.name} takes {kind} and not {argument!r}")
                argument = argument.item()
            plain.append(argument)
        self._launch(*grid, *block, *plain)


@cache
def compiled(source: str) -> dict[str, Kernel]:
    """The kernels of a source, by name. Compiled once and kept, as CuPy keeps its own; raises RuntimeError where gcc
    does not take it."""
    typedefs = {name: kind for kind, name in re.findall(r"typedef ([\w ]+) (\w+);", source)}
    kernels = {name: [" ".join(p.split()) for p in text.split(",")] for name, text in _KERNEL.findall(source)}
    text = _PRELUDE + source.replace('extern "C"', "")
    for name, parameters in kernels.items():
        arguments = ", ".join(re.findall(r"\w+$", each)[0] for each in parameters)
        text += _LAUNCH % {"name": name, "parameters": ", ".join(parameters), "arguments": arguments}
    digest = hashlib.sha256("\0".join([text, *_OPTIONS]).encode()).hexdigest()[:24]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "central-storage", "c-kernels")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{digest}.so"
    if not path.exists():
        assert COMPILER is not None
        with tempfile.TemporaryDirectory(dir=directory) as made:
            file = Path(made) / "kernels.c"
            file.write_text(text)
            command = [COMPILER, *_OPTIONS, *_UNUSED, "-o", f"{made}/kernels.so", str(file), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"gcc: {done.stderr}")
            Path(made, "kernels.so").rename(path)
    library = ctypes.CDLL(str(path))
    return {
        name: Kernel(library, name, [re.sub(r"^\w+", lambda m: typedefs.get(m[0], m[0]), p) for p in parameters])
        for name, parameters in kernels.items()
    }
