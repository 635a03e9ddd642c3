"""Which pages of a private mapping this process has written: Linux says so in ``/proc/self/pagemap``.

A page of a private mapping is the file's until this process writes to it; then it is the process's own copy. The kernel
gives each page 64 bits: bit 63 says that it is present, bit 62 that it is swapped out, bit 61 that it is the file's
(https://docs.kernel.org/admin-guide/mm/pagemap.html).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable

import numpy as np

__all__ = ["Pagemap"]

_ENTRY_NBYTES = 8
# Entries that are read at once: those of a GiB of small pages.
_AT_ONCE = 1 << 18
# What the last bytes of entries, which have the three bits, say by their value: 1 for a page of the process's own. And
# the values that do not say so. bytes.translate looks at few pages faster than NumPy does.
_IS_OWN = bytes((byte & 0b11000000) > 0 and not byte & 0b00100000 for byte in range(256))
_NOT_OWN = bytes(byte for byte in range(256) if not _IS_OWN[byte])


class Pagemap:
    """The pages of this process, by address in bytes."""

    def __init__(self) -> None:
        """Raises OSError where this process may not see its pages, or the kernel does not say whose they are."""
        self._file = os.open("/proc/self/pagemap", os.O_RDONLY)
        weakref.finalize(self, os.close, self._file).atexit = False
        self._test()

    def own_pages(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The pages between two addresses, both multiples of the page size, that this process has written: as ascending
        ranges (start, stop) of addresses.

        Raises OSError if they cannot be read.
        """
        found: list[tuple[int, int]] = []
        for first in range(start, stop, _AT_ONCE * mmap.PAGESIZE):
            left = (stop - first) // mmap.PAGESIZE
            count = left if left < _AT_ONCE else _AT_ONCE
            entries = os.pread(self._file, count * _ENTRY_NBYTES, first // mmap.PAGESIZE * _ENTRY_NBYTES)
            if len(entries) != count * _ENTRY_NBYTES:
                raise OSError(f"/proc/self/pagemap has only {len(entries)} bytes for {count} pages")
            last_bytes = entries[_ENTRY_NBYTES - 1 :: _ENTRY_NBYTES]
            if last_bytes.translate(None, _NOT_OWN):
                is_own = np.frombuffer(last_bytes.translate(_IS_OWN), np.bool_)
                bounds = np.flatnonzero(np.diff(is_own, prepend=False, append=False)).reshape(-1, 2) * mmap.PAGESIZE
                found += [(first + int(low), first + int(high)) for low, high in bounds]
        return found

    def may_have_own(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether this process may have written a page of these ranges (start, stop) of addresses, all multiples of the
        page size. True also where the kernel does not say, and where there are so many pages that to find the written
        ones takes little longer."""
        for start, stop in ranges:
            count = (stop - start) // mmap.PAGESIZE
            if count > _AT_ONCE:
                return True
            try:
                entries = os.pread(self._file, count * _ENTRY_NBYTES, start // mmap.PAGESIZE * _ENTRY_NBYTES)
            except OSError:
                return True
            is_whole = len(entries) == count * _ENTRY_NBYTES
            if not is_whole or entries[_ENTRY_NBYTES - 1 :: _ENTRY_NBYTES].translate(None, _NOT_OWN):
                return True
        return False

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
