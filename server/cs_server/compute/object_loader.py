"""Runs machine code that `jit` has made, in this process or, kept in a file, in another one.

That needs LLVM, not numba, whose import alone takes longer than everything else a server does at its start; and the
code is no pickle. Whoever calls `kernel` vouches for the code: where it came from, and that it is whole.
"""

import ctypes
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeAlias

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

SYMBOL = "kernel"
"""The name of the function that a piece of machine code holds."""

Bind: TypeAlias = Callable[..., Callable[[], None]]
"""Takes arrays, in the order in which `jit` finds them."""

# What numba gives to a function beside its arguments: where to put a result, and an exception. A kernel has neither.
_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_SPARE_NBYTES = 64


def target() -> llvm.TargetMachine:
    """What code is made for: this processor, as numba does it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if llvm.Target.from_default_triple().name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


def kernel(code: bytes) -> Bind:
    """The function in ``code``, an object file with `SYMBOL` in it. Given its arguments it returns a function to call
    any number of times, which runs the code over what they hold by then. It holds no lock, and not the GIL."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    function = _Function(engine.get_function_address(SYMBOL))

    def bind(*arrays: NDArray[Any]) -> Callable[[], None]:
        places = chain.from_iterable((a.__array_interface__["data"][0], len(a)) for a in arrays)
        words, spare = np.array(list(places), np.int64), ctypes.create_string_buffer(2 * _SPARE_NBYTES)
        result = ctypes.addressof(spare)
        arguments = (result, result + _SPARE_NBYTES, words.ctypes.data)

        def run(kept: object = (engine, arrays, words, spare)) -> None:  # they live as long as the addresses
            status = function(*arguments)
            if status:
                raise RuntimeError(f"a kernel ended with status {status}")

        return run

    return bind
