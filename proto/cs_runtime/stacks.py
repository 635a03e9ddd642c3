"""The stacks of this process for another process of the same user: ``cs-ctl stack``.

Every process of a service, and its script, makes a memory file of its own and has :data:`SIGNAL` write the stacks of
all its threads there. Python's faulthandler does it, which needs no lock of the interpreter: it works also while native
code runs. SIGUSR1 prints the same to stderr, where the process has one that somebody reads. ``cs-ctl`` finds the file
among the descriptors of the process, so no other process takes part.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
from typing import Any

__all__ = ["FILE", "SIGNAL", "keep_ready"]

#: A real-time signal, because programs use SIGUSR1 and SIGUSR2 for purposes of their own.
SIGNAL = int(signal.SIGRTMAX) - 5
#: The name of the memory file.
FILE = "cs-stacks"

_descriptors: list[int] = []


def keep_ready() -> None:
    """From now on, :data:`SIGNAL` writes the stacks to the memory file. Idempotent. Does nothing if the program uses
    that signal itself, or if no descriptor is free."""
    if _descriptors or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    try:
        descriptor = os.memfd_create(FILE, os.MFD_CLOEXEC)
    except OSError:  # the process works, and only its stacks are not shown
        return
    # The reader makes the file empty, and this process goes on at its end.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    without_c: dict[str, Any] = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    try:
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False, **without_c)
    except (OSError, RuntimeError):
        os.close(descriptor)
        return
    _descriptors.append(descriptor)
