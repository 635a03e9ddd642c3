"""Runs machine code that `fused` has made, in this process or, kept in a file, in another one.

That needs no numba, whose import alone takes longer than everything else a server does at its start; and the code is no
pickle. Nor does it need LLVM, which takes half as long as NumPy, where the code is of the kind that a kernel is on most
machines: for x86-64, and complete in itself but for `memset`. What else there is LLVM puts into memory. Whoever calls
`kernel` vouches for the code: where it came from, and that it is whole.
"""

import ctypes
import mmap
import platform
import struct
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

SYMBOL = "kernel"
"""The name of the function that a piece of machine code holds."""

Bind: TypeAlias = Callable[..., Callable[[], None]]
"""Takes arrays, in the order in which `fused` finds them."""

# What numba gives to a function beside its arguments: where to put a result, and an exception. A kernel has neither.
_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_SPARE_NBYTES = 64


def target() -> Any:
    """What code is made for, of `llvmlite.binding`: this processor, as numba does it."""
    import llvmlite.binding as llvm

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
    """The function in ``code``, an object file with `SYMBOL` in it: given its arguments, something to call, any number
    of times, that has it run over what they hold by then. It holds no lock, and not the GIL."""
    memory, address = in_memory(code) or by_llvm(code)
    function = _Function(address)

    def bind(*arrays: NDArray[Any]) -> Callable[[], None]:
        places = chain.from_iterable((a.__array_interface__["data"][0], len(a)) for a in arrays)
        words, spare = np.array(list(places), np.int64), ctypes.create_string_buffer(2 * _SPARE_NBYTES)
        result = ctypes.addressof(spare)
        arguments = (result, result + _SPARE_NBYTES, words.ctypes.data)

        def run(kept: object = (memory, arrays, words, spare)) -> None:  # they live as long as the addresses
            status = function(*arguments)
            if status:
                raise RuntimeError(f"a kernel ended with status {status}")

        return run

    return bind


def by_llvm(code: bytes) -> tuple[Any, int]:
    """What holds the code in memory, and the address of its function there."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine, engine.get_function_address(SYMBOL)


# Of an ELF file: its header, a section's, a symbol, a relocation; and what a kernel has of all that there may be.
_HEADER, _SECTION = struct.Struct("<4sBB10xHH20xQ10xHHH"), struct.Struct("<IIQQQQIIQQ")
_SYMBOL, _RELOCATION = struct.Struct("<IBBHQQ"), struct.Struct("<QIIq")
_OF_X86_64 = (b"\x7fELF", 2, 1, 1, 62)  # of 64 bits, little-endian, an object file
_CONTENT, _SYMBOLS, _RELOCATIONS = 1, 2, 4  # kinds of section
_IS_WRITTEN, _IS_LOADED, _IS_FOR_THREADS = 1, 2, 1024
_ABSOLUTE = 1  # the one kind of relocation: 64 bits of an address
_ELSEWHERE = 0  # the section of a symbol that is not in the file
_FILL = b"memset"  # what LLVM makes of a loop that fills memory: all that a kernel calls


def in_memory(code: bytes) -> tuple[Any, int] | None:
    """As `by_llvm`, without it; None where the code is not for this, or not for x86-64."""
    if platform.machine() != "x86_64" or len(code) < _HEADER.size:
        return None
    *kind, sections_at, _, count, _ = _HEADER.unpack_from(code)
    if tuple(kind) != _OF_X86_64:
        return None
    sections = [_SECTION.unpack_from(code, sections_at + n * _SECTION.size) for n in range(count)]
    places, size = {}, 0
    for n, (_, sort, flags, _, _, nbytes, _, _, alignment, _) in enumerate(sections):
        # What unwinds the stack of an exception is left out: a kernel raises none.
        if flags & _IS_LOADED and nbytes and sort == _CONTENT:
            if flags & (_IS_WRITTEN | _IS_FOR_THREADS):
                return None
            places[n] = start = -(-size // alignment) * alignment
            size = start + nbytes
    memory = mmap.mmap(-1, size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for n, place in places.items():
        at, nbytes = sections[n][4:6]
        memory[place : place + nbytes] = code[at : at + nbytes]
    [symbols] = [section for section in sections if section[1] == _SYMBOLS]
    names_at = sections[symbols[6]][4]
    libc, addresses, function = ctypes.CDLL(None, use_errno=True), [], None
    for at in range(symbols[4], symbols[4] + symbols[5], _SYMBOL.size):
        start, _, _, section, value, _ = _SYMBOL.unpack_from(code, at)
        name = code[names_at + start : code.index(b"\0", names_at + start)]
        if section == _ELSEWHERE and name == _FILL:
            addresses.append(ctypes.cast(libc.memset, ctypes.c_void_p).value)
        else:
            addresses.append(base + places[section] + value if section in places else None)
        if name == SYMBOL.encode():
            function = addresses[-1]
    for _, sort, _, _, at, nbytes, _, of, _, _ in sections:
        for entry in range(at, at + nbytes, _RELOCATION.size) if sort == _RELOCATIONS and of in places else ():
            place, how, symbol, addend = _RELOCATION.unpack_from(code, entry)
            if how != _ABSOLUTE or addresses[symbol] is None:
                return None
            struct.pack_into("<Q", memory, places[of] + place, addresses[symbol] + addend)
    if function is None or libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
        return None
    return memory, function
