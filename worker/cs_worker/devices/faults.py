"""A line that names the variable or argument when a write to protected memory ends this worker.

Variables are unwritable where they are protected, and variables and arguments where the kernel grants no copies on
write. NumPy refuses to write to them in any case. Native code that does not know read-only memory, such as an in-place
operation of torch, ends the worker by SIGSEGV. Python's faulthandler then prints the stacks, but not the address; the
handler here compares the address with what is mapped.

It runs after faulthandler, because it is Python code and needs the interpreter's lock, while faulthandler needs no
lock. So the stacks are printed in any case. faulthandler restores the handler that it found and calls it by raise().
Such a signal carries no address, but the kernel puts the address of the thread's last fault into the context of every
signal.

One case remains in which the worker hangs once its stacks are printed: a thread that holds the interpreter's lock waits
for the thread that faults.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import mmap
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from cs_runtime.shared_memory.mapping import read_only_at

__all__ = ["name_faults"]

# The offset in ucontext_t of the address of the thread's last fault: gregs[REG_CR2], fault_address.
_ADDRESS_AT = {"x86_64": 216, "aarch64": 176}
# The offset of si_code in siginfo_t. It is above 0 if the kernel sent the signal for a fault.
_CODE_AT = 8
_SA_SIGINFO, _SA_ONSTACK = 0x4, 0x08000000
_SIG_DFL = 0
_STDERR = 2
# The stack that faulthandler makes for itself is too small for Python code.
_STACK_NBYTES = 256 << 10
# Threads of one operation fault together. The first of them prints the stacks of all and ends the process; the others
# give it this long.
_PRINTING_SECONDS = 1.0

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
# Calls keep the interpreter's lock.
_libc = ctypes.PyDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """``struct sigaction`` of the C library."""

    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Stack(ctypes.Structure):
    """``stack_t`` of the C library."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("nbytes", ctypes.c_size_t))


def name_faults(describe: Callable[[str, int], str]) -> None:
    """After a segmentation fault by a write to read-only memory, print a line that names the variable or argument.

    ``describe`` returns, as text, what lies in a segment (its name) at an offset in bytes. To be called once, by the
    main thread of a worker process, since signals belong to the whole process. Does nothing on processors whose
    ucontext_t is not known here, nor under Python 3.14 and later, which takes any stack but the thread's own for an
    overflow.
    """
    address_at = _ADDRESS_AT.get(platform.machine())
    if address_at is None or sys.version_info >= (3, 14):
        return
    handler = _Handler(_Namer(describe, address_at))
    _put_behind_faulthandler(handler)
    stack = mmap.mmap(-1, _STACK_NBYTES)
    start = ctypes.addressof(ctypes.c_char.from_buffer(stack))
    _libc.sigaltstack(ctypes.byref(_Stack(start, 0, _STACK_NBYTES)), None)
    # After the end of the interpreter no Python code can run. Until then this keeps the handler and its stack alive.
    atexit.register(_put_behind_faulthandler, None, handler, stack)


def _put_behind_faulthandler(handler: Any, *_kept: object) -> None:
    """Make ``handler``, or the default where it is None, what faulthandler restores once it has printed."""
    prints_stacks = faulthandler.is_enabled()
    faulthandler.disable()
    if handler is None:
        _libc.signal(signal.SIGSEGV, _SIG_DFL)
    else:
        action = _Action(handler, flags=_SA_SIGINFO | _SA_ONSTACK)
        _libc.sigaction(signal.SIGSEGV, ctypes.byref(action), None)
    if prints_stacks:
        faulthandler.enable()


class _Namer:
    """The handler."""

    def __init__(self, describe: Callable[[str, int], str], address_at: int) -> None:
        self._describe = describe
        self._address_at = address_at
        self._has_said = False

    def __call__(self, number: int, information: int, context: int) -> None:
        """Name the variable or argument, if the address is in a read-only mapping; then end the process by the signal,
        as without a handler."""
        try:
            # faulthandler raises it once it has printed.
            is_raised = ctypes.c_int.from_address(information + _CODE_AT).value <= 0
            if not is_raised and faulthandler.is_enabled():
                time.sleep(_PRINTING_SECONDS)
            found = read_only_at(ctypes.c_uint64.from_address(context + self._address_at).value)
            if found is not None and not self._has_said:
                self._has_said = True
                os.write(_STDERR, _line(self._describe(*found)))
            elif found is None and not is_raised:  # of faulthandler itself, in the stack of a thread that runs on
                time.sleep(_PRINTING_SECONDS)  # so that a thread whose fault has a name says it
        finally:
            _libc.signal(number, _SIG_DFL)
            getattr(_libc, "raise")(number)  # blocked until the handler returns


def _line(what: str) -> bytes:
    text = (
        f"SIGSEGV: something wrote in place to {what}, which a replica may only read; "
        "write to a copy: variable.numpy(), np.array(x) or x.clone()"
    )
    return f"\n{text}\n".encode(errors="backslashreplace")
