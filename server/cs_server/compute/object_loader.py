"""Runs machine code that `jit` has made, in this process or, kept in a file, in another; several pieces by one call.

That needs LLVM, not numba, whose import alone takes longer than everything else a server does at its start; and the
code is no pickle. Whoever calls `kernel` vouches for the code: where it came from, and that it is whole.
"""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

SYMBOL = "kernel"
"""The name of the function that a piece of machine code holds."""

Bind: TypeAlias = Callable[..., "Bound"]
"""Takes arrays, in the order in which the code finds them, and returns the code over these arrays."""

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


class Bound:
    """A kernel with the arrays that it runs over. Call it any number of times: it reads what they hold by then. It
    holds no lock, and not the GIL."""

    def __init__(self, engine: llvm.ExecutionEngine, address: int, arrays: tuple[Any, ...]) -> None:
        """``address`` is that of the function, and ``engine`` holds its code."""
        places = itertools.chain.from_iterable((a.__array_interface__["data"][0], len(a)) for a in arrays)
        words, spare = np.array(list(places), np.int64), ctypes.create_string_buffer(2 * _SPARE_NBYTES)
        result = ctypes.addressof(spare)
        #: The addresses of the function and of its words.
        self.call = (address, words.ctypes.data)
        self._arguments = (result, result + _SPARE_NBYTES, words.ctypes.data)
        self._function = _Function(address)
        self._kept: tuple[Any, ...] = (engine, arrays, words, spare)  # as long as the addresses

    def keep(self, used: Sequence[object]) -> None:
        """Let ``used`` live as long as this: memory of which only the address is in the arrays."""
        self._kept += (*used,)

    def status(self) -> int:
        """Call it; what it returns, 0 unless it fails."""
        status: int = self._function(*self._arguments)
        return status

    def __call__(self) -> None:
        if status := self._function(*self._arguments):
            raise RuntimeError(f"a kernel ended with status {status}")


def call(function: int, words: int) -> int:
    """What the function returns, for the two addresses of `Bound.call`."""
    spare = ctypes.create_string_buffer(2 * _SPARE_NBYTES)
    result = ctypes.addressof(spare)
    status: int = _Function(function)(result, result + _SPARE_NBYTES, words)
    return status


def kernel(code: bytes) -> Bind:
    """The function in ``code``, an object file with `SYMBOL` in it; given its arguments, it can be called."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    return _bind(engine)


def in_turn(kernels: Sequence[Bound]) -> Bound:
    """All of these kernels, one after the other, in one call."""
    table = np.array([each.call for each in kernels], np.int64).reshape(-1)
    bound = chain()(table)
    bound.keep(kernels)
    return bound


@cache
def chain() -> Bind:
    """A kernel that calls others: its array has of each the address, and that of its words."""
    byte, word, status = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
    signature = ir.FunctionType(status, [byte, byte, word.as_pointer()])
    module = ir.Module()
    function = ir.Function(module, signature, SYMBOL)
    result, raised, words = function.args
    entry, following, call, failed, done = map(function.append_basic_block, ("entry", "next", "call", "failed", "done"))
    builder = ir.IRBuilder(entry)

    def element(array: Any, index: Any) -> Any:
        return builder.load(builder.gep(array, [index]))

    table = builder.inttoptr(element(words, word(0)), word.as_pointer())
    length = element(words, word(1))
    builder.branch(following)
    builder.position_at_end(following)
    place = builder.phi(word)
    place.add_incoming(word(0), entry)
    builder.cbranch(builder.icmp_signed("<", place, length), call, done)
    builder.position_at_end(call)
    address, own = element(table, place), element(table, builder.add(place, word(1)))
    given = [result, raised, builder.inttoptr(own, word.as_pointer())]
    returned = builder.call(builder.inttoptr(address, signature.as_pointer()), given)
    place.add_incoming(builder.add(place, word(2)), call)
    builder.cbranch(builder.icmp_signed("==", returned, status(0)), following, failed)
    builder.position_at_end(failed)
    builder.ret(returned)
    builder.position_at_end(done)
    builder.ret(status(0))
    return assembled(str(module))


def assembled(code: str) -> Bind:
    """The function in ``code``, a module of LLVM's language with `SYMBOL` in it."""
    return _bind(llvm.create_mcjit_compiler(llvm.parse_assembly(code), target()))


def _bind(engine: llvm.ExecutionEngine) -> Bind:
    engine.finalize_object()
    address = engine.get_function_address(SYMBOL)
    return lambda *arrays: Bound(engine, address, arrays)
