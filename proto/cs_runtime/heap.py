"""The heap of a process through which much data passes in large blocks."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_blocks"]

# Options of glibc's mallopt: how much free memory stays, and from which size on a block is mapped by itself.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Free bytes that stay in each heap of the process.
KEPT_NBYTES = 64 << 20
# glibc accepts no more.
_MAPPED_NBYTES = 32 << 20


def keep_freed_blocks() -> None:
    """Use the memory of freed blocks for later ones, up to 64 MiB in each heap. By default glibc gives most of it back
    to the kernel, which then clears every page of the next block; that takes longer than to copy it.

    Does nothing where the C library has no such options.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_NBYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_NBYTES)
