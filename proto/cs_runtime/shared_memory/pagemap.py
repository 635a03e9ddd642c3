"""Which pages of a private mapping this process has written: Linux says so in ``/proc/self/pagemap``.

A page of a private mapping is the file's until this process writes to it; then it is the process's own copy. The kernel
gives each page 64 bits: bit 63 says that it is present, bit 62 that it is swapped out, bit 61 that it is the file's
(https://docs.kernel.org/admin-guide/mm/pagemap.html).
"""

from __future__ import annotations

import mmap
import os

import numpy as np

__all__ = ["Pagemap"]

_ENTRY_NBYTES = 8
# Entries that are read at once: those of a GiB of small pages.
_AT_ONCE = 1 << 18


class Pagemap:
    """The pages of this process, by address in bytes."""

    def __init__(self) -> None:
        """Raises OSError where this process may not see its pages, or the kernel does not say whose they are."""
        self._file = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            self._test()
        except OSError:
            os.close(self._file)
            raise

    def own_pages(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The pages between two addresses, both multiples of the page size, that this process has written: as ascending
        ranges (start, stop) of addresses.

        Raises OSError if they cannot be read.
        """
        found: list[tuple[int, int]] = []
        for first in range(start, stop, _AT_ONCE * mmap.PAGESIZE):
            entries = np.empty(min((stop - first) // mmap.PAGESIZE, _AT_ONCE), np.uint64)
            nbytes = os.preadv(self._file, [entries.data], first // mmap.PAGESIZE * _ENTRY_NBYTES)
            if nbytes != entries.nbytes:
                raise OSError(f"/proc/self/pagemap has {nbytes} of {entries.nbytes} bytes")
            state = entries >> np.uint64(61)
            is_own = (state != 0) & ((state & np.uint64(1)) == 0)
            if is_own.any():
                bounds = np.flatnonzero(np.diff(is_own, prepend=False, append=False)).reshape(-1, 2) * mmap.PAGESIZE
                found += [(first + int(low), first + int(high)) for low, high in bounds]
        return found

    def _test(self) -> None:
        """Raise OSError unless the kernel tells a page that was written from one that was only read."""
        file = os.memfd_create("test")
        try:
            os.ftruncate(file, 3 * mmap.PAGESIZE)
            with mmap.mmap(file, 3 * mmap.PAGESIZE, mmap.MAP_PRIVATE) as mapped:
                _ = mapped[0]
                mapped[mmap.PAGESIZE] = 1
                address = int(np.frombuffer(mapped, np.uint8).__array_interface__["data"][0])
                written = address + mmap.PAGESIZE
                if self.own_pages(address, address + 3 * mmap.PAGESIZE) != [(written, written + mmap.PAGESIZE)]:
                    raise OSError("/proc/self/pagemap does not tell the pages that this process has written")
        finally:
            os.close(file)
