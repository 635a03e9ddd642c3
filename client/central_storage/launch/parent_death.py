"""What a new process asks the kernel first: to end it when its parent dies, however that happens."""

from __future__ import annotations

import ctypes
import os

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def end_with_parent(parent: int, number: int) -> None:
    """Let this process get the signal ``number`` when the thread that started it ends; ``parent`` is the pid of that
    process. Exit at once if it has ended already. For the ``preexec_fn`` of a child."""
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
