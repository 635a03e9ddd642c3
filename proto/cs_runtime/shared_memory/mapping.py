"""A mapped segment.

Every segment is made by the supervisor on the server's request and handed out as a descriptor, so its contents
outlive any other process. Its file is as long as its *reservation*, and only what is touched takes memory. It may
become longer and never shorter, so a mapping made once stays valid for ever; a process that needs more maps the
segment again. A reader's descriptor is open read-only: the kernel keeps a worker from writing parameters by mistake.
Code that tries to write them on purpose can, since it runs as the same user. A worker maps what user's code reads so
that a write by native code gives the process a copy of the page, at the same address: nothing else happens, and the
worker can give the copy back.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import resource
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from cs_proto.arrays import Array, Location, view_of
from cs_proto.errors import LocalProtocolError, MemoryPlanError
from cs_proto.ranges import merged, without
from cs_proto.sizes import in_units
from cs_runtime import machine

from .pagemap import Pagemap

__all__ = ["Mapping", "address_of", "pages_of", "read_only_at"]

# Linux 5.14: populate page tables for writing; older kernels answer EINVAL and pages come at first touch.
_MADV_POPULATE_WRITE = 23
# Linux 6.1: replace small pages by pages of 2 MiB, even if the system setting denies them to shared memory. With small
# pages, translating the address of a row of a large table takes as long as reading the row.
_MADV_COLLAPSE = 25
_HUGE_NBYTES = 2 << 20
# Memory that is taken at once without a look at what is available, that is taken between two looks, and that must stay
# available: for processes that take a piece at the same time, and for what nobody plans.
_CHECKED_NBYTES, _PIECE_NBYTES, _SPARE_NBYTES = 1 << 20, 16 << 20, 64 << 20
# The module mmap lacks these: mapping over another mapping, memory that is not accounted for, and changing the
# rights of mapped pages.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _mprotect = _libc.mmap, _libc.mprotect
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# Whether the kernel grants a process more private memory than the machine has: 2 means never.
_OVERCOMMIT = "/proc/sys/vm/overcommit_memory"

# Name, address and length (bytes) of each mapping that this process may only read, as long as something views it.
_read_only: weakref.WeakKeyDictionary[mmap.mmap, tuple[str, int, int]] = weakref.WeakKeyDictionary()


def read_only_at(address: int) -> tuple[str, int] | None:
    """The name of the segment at ``address`` that this process may only read, and the offset there in bytes; None if
    there is no such segment."""
    for name, start, nbytes in list(_read_only.values()):
        if start <= address < start + nbytes:
            return name, address - start
    return None


def address_of(array: np.ndarray) -> int:
    """The address of the first byte of ``array``."""
    return int(array.__array_interface__["data"][0])


class Mapping:
    """A segment mapped into this process. Closing does not wait: views keep the pages until they are dropped."""

    def __init__(
        self,
        name: str,
        descriptor: int,
        nbytes: int,
        *,
        writable: bool,
        may_preserve: bool = False,
        copies_on_write: bool = False,
    ) -> None:
        """Map ``nbytes`` of the open file ``descriptor``, which this object owns from now on.

        With ``may_preserve`` bytes can be preserved. With ``copies_on_write``, too, native code may write to the
        mapping: each page that it writes becomes a copy of this process. NumPy refuses all the same. Where the machine
        grants no memory beyond what it has, or the kernel does not tell which pages are such copies, the pages stay
        unwritable. Both are not for a writable mapping, nor for
        memory that a device reads, because its driver would copy every page that it locks. Raises OSError, ValueError
        or OverflowError if the file cannot be mapped.
        """
        self.name = name
        self.nbytes = nbytes
        self.writable = writable
        #: Whether native code gets a copy of a page that it writes.
        self.copies_on_write = copies_on_write and _is_granted() and _are_copies_told()
        try:
            self._map, self._first = self._made(descriptor, may_preserve)
        except (OSError, ValueError, OverflowError):
            os.close(descriptor)
            raise
        # The blocks for which huge pages have been asked, as ranges.
        self._huge: list[tuple[int, int]] = []
        # The pages that native code cannot write, as ranges.
        self._unwritable = [] if writable or self.copies_on_write else pages_of([(0, nbytes)])
        memory = memoryview(self._map)[self._first : self._first + nbytes]
        self.memory = memory if writable else memory.toreadonly()
        self._address: int = address_of(np.frombuffer(self.memory, np.uint8))
        self._descriptor = descriptor
        status = os.fstatvfs(descriptor)
        # On a file system of limited size, space must be reserved before the first touch; a memfd has no such limit.
        self._is_limited = writable and status.f_blocks > 0
        #: Bytes for which the segment and its file system have room.
        self.room_nbytes = min(nbytes, status.f_blocks * status.f_frsize or nbytes)
        if writable:
            weakref.finalize(self, os.close, descriptor).atexit = False
        else:
            os.close(descriptor)
            _read_only[self._map] = name, self._address, nbytes

    def _made(self, descriptor: int, may_preserve: bool) -> tuple[mmap.mmap, int]:
        if self.copies_on_write:
            try:
                kind = mmap.MAP_PRIVATE | _MAP_NORESERVE
                return _mapped(descriptor, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind)
            except OSError:
                self.copies_on_write = False
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        return _mapped(descriptor, self.nbytes, protection, mmap.MAP_PRIVATE if may_preserve else mmap.MAP_SHARED)

    @property
    def free_nbytes(self) -> int | None:
        """Bytes left in the segment's file system; None if only the machine's memory limits the segment."""
        if not self._is_limited:
            return None
        status = os.fstatvfs(self._descriptor)
        return status.f_bavail * status.f_frsize

    def reserve(self, start: int, stop: int) -> None:
        """Make sure that bytes ``start`` to ``stop`` can be written: a store into a full file system would end the
        process with SIGBUS. Costs nothing if only the machine's memory limits the segment.

        Raises :class:`MemoryPlanError` if the file system has no room left.
        """
        if not self._is_limited or stop <= start:
            return
        try:
            os.posix_fallocate(self._descriptor, start, stop - start)
        except OSError as error:
            planned, free = stop - start, self.free_nbytes or 0
            raise MemoryPlanError(
                f"segment {self.name}: {planned} bytes planned{in_units(planned)}, but the file system that it lies in "
                f"has {free} bytes available{in_units(free)} ({error.strerror}); make the volume of the run directory "
                "larger"
            ) from error

    def take(self, start: int, stop: int, what: str, *, is_checked: bool = False) -> None:
        """Make the pages of bytes ``start`` to ``stop`` present for ``what``, but only while the machine, and every
        control group around this process, keeps some memory for everything else: the kernel would kill a process of the
        service otherwise. Small pieces are not checked, unless ``is_checked``.

        Raises :class:`MemoryPlanError` with the bytes that are needed and available. Nothing is taken then.
        """
        if stop - start < _CHECKED_NBYTES and not is_checked:
            self.reserve(start, stop)
            return
        for first in range(start, stop, _PIECE_NBYTES):
            last = min(stop, first + _PIECE_NBYTES)
            # Other processes may take memory at the same time, so it is taken in pieces, and looked at in between.
            have = machine.available_nbytes() - _SPARE_NBYTES
            try:
                if last - first > have:
                    need, left = stop - start, max(0, have + first - start)
                    raise MemoryPlanError(
                        f"{what} {need} bytes{in_units(need)} more memory, but {left} bytes{in_units(left)} are "
                        f"available beside the {_SPARE_NBYTES} bytes that stay free"
                    )
                self.reserve(first, last)
                self._touch(first, last)
            except MemoryPlanError:
                self.discard(start, first)
                raise

    def view(self, array: Array) -> np.ndarray:
        """The array of this descriptor, which lies in this segment; read-only if the segment is."""
        if not isinstance(array.place, Location) or array.place.segment != self.name:
            raise LocalProtocolError(f"{array} does not lie in segment {self.name}")
        end = array.place.offset + array.nbytes
        if end > self.nbytes:
            raise LocalProtocolError(f"{array} ends at byte {end}, but segment {self.name} has {self.nbytes}")
        return view_of(array, self.memory[array.place.offset : end])

    def rows(self, array: Array, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows of the array; ``rows`` is int64 of any shape, within the array."""
        return np.take(self.view(array), rows, axis=0)  # indexing takes three times as long

    def write(self, array: Array, value: np.ndarray) -> None:
        """Write ``value`` where the array lies."""
        self.view(array)[...] = value

    def elements(self, dtype: str) -> np.ndarray:
        """The whole segment as a 1-D array of ``dtype``."""
        return np.frombuffer(self.memory, dtype)

    def populate(self, start: int, stop: int) -> None:
        """Make the pages of bytes ``start`` to ``stop`` present now, so that no step pays for their first touch.

        Raises :class:`MemoryPlanError` if the machine has no memory left.
        """
        if stop <= start:
            return
        self.reserve(start, stop)
        self.use_huge_pages(start, stop)
        self._touch(start, stop)

    def use_huge_pages(self, start: int, stop: int) -> None:
        """Let bytes ``start`` to ``stop``, all of which are about to be written, lie in huge pages, if the kernel has
        any. To ask again costs nothing."""
        # Only blocks that lie wholly in the range: parts of the others may have been given back and must stay so.
        whole = (start + -start % _HUGE_NBYTES, stop - stop % _HUGE_NBYTES)
        for low, high in without(merged([whole]), self._huge):
            # Only memory that already has pages can become huge pages.
            np.frombuffer(self.memory, np.uint8)[low:high:_HUGE_NBYTES] |= 0
            with suppress(OSError):  # the kernel is older, or has no huge page left
                self._advise(_MADV_COLLAPSE, low, high)
        self._huge = merged([*self._huge, whole])

    def _touch(self, start: int, stop: int) -> None:
        try:
            self._advise(_MADV_POPULATE_WRITE, start - start % mmap.PAGESIZE, stop)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise MemoryPlanError(
                    f"bytes {start} to {stop} of segment {self.name} could not be made present: {error.strerror}"
                ) from error
            # Writing the present value allocates the page. Only bytes of the range are written: others have other
            # owners.
            touched = np.ctypeslib.as_array((ctypes.c_uint8 * (stop - start)).from_address(self._address + start))
            touched[:1] |= 0
            touched[-start % mmap.PAGESIZE :: mmap.PAGESIZE] |= 0

    def detach(self, start: int, stop: int) -> None:
        """Make these whole pages private to this process, at the same address and with the same content.

        Until :meth:`attach` no other process writes them or sees what is written. Raises :class:`MemoryPlanError` if
        there is no memory for the copies.
        """
        self._remap(start, stop, mmap.MAP_PRIVATE)
        self._touch(start, stop)  # writing to a page makes it a copy

    def attach(self, start: int, stop: int) -> None:
        """Undo :meth:`detach`: these whole pages are those of the segment again."""
        self._remap(start, stop, mmap.MAP_SHARED)

    def preserve(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Keep these bytes (start, stop), and all bytes of their pages, as they are in this mapping, also when the
        segment is written: the pages become private copies of this process. The mapping was made with
        ``may_preserve``.

        Raises :class:`MemoryPlanError` if the kernel has no memory for that; then nothing has changed.
        """
        pages = pages_of(ranges)
        try:
            for start, stop in pages:
                self._set_rights(start, stop, mmap.PROT_READ | mmap.PROT_WRITE)
                self._touch(start, stop)
                self._take_rights(start, stop)
        except MemoryPlanError:
            for start, stop in pages:
                self._advise(mmap.MADV_DONTNEED, start, stop)
                with suppress(MemoryPlanError):
                    self._take_rights(start, stop)
            raise

    def preserved_nbytes(self, ranges: Sequence[tuple[int, int]]) -> int:
        """The bytes of memory that :meth:`preserve` takes for these ranges (start, stop)."""
        return sum(stop - start for start, stop in pages_of(ranges))

    def own_pages(self, pagemap: Pagemap, pages: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The pages, of ``pages`` (ranges of whole pages in bytes, ascending), that are copies of this process, because
        it has written or preserved them. Raises OSError if the kernel does not say."""
        address, found = self._address, []
        for start, stop in pages:
            for first, last in pagemap.own_pages(address + start, address + stop):
                found.append((first - address, last - address))
        return found

    def addresses(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The addresses (start, stop) of these bytes (start, stop)."""
        return [(self._address + start, self._address + stop) for start, stop in ranges]

    def restore(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Give back what this process has written to the pages of these bytes (start, stop): they show the segment
        again. What was preserved in these pages is lost, too."""
        for start, stop in pages_of(ranges):
            self._advise(mmap.MADV_DONTNEED, start, stop)

    def protect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Make the pages of these bytes (start, stop) unwritable for good: a write ends this process by SIGSEGV.

        Raises :class:`MemoryPlanError` if the kernel has no memory for its records of that.
        """
        pages = pages_of(ranges)
        for start, stop in pages:
            self._set_rights(start, stop, mmap.PROT_READ)
        self._unwritable = merged([*self._unwritable, *pages])

    def _take_rights(self, start: int, stop: int) -> None:
        """Make the pages of a range unwritable that are to be so."""
        for first, last in self._unwritable:
            if max(start, first) < min(stop, last):
                self._set_rights(max(start, first), min(stop, last), mmap.PROT_READ)

    def _set_rights(self, start: int, stop: int, protection: int) -> None:
        if _mprotect(self._address + start, stop - start, protection):
            rights = "preserved" if protection & mmap.PROT_WRITE else "protected"
            raise MemoryPlanError(
                f"bytes {start} to {stop} of segment {self.name} could not be {rights}: "
                f"{os.strerror(ctypes.get_errno())}"
            )

    def _remap(self, start: int, stop: int, kind: int) -> None:
        address = self._address + start
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(address, stop - start, protection, kind | _MAP_FIXED, self._descriptor, start) != address:
            raise MemoryPlanError(
                f"bytes {start} to {stop} of segment {self.name} could not be mapped again: "
                f"{os.strerror(ctypes.get_errno())}"
            )

    def discard(self, start: int, stop: int) -> None:
        """Give whole pages between ``start`` and ``stop`` back; they read as zeros afterwards."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop - stop % mmap.PAGESIZE
        if last > first:
            self._advise(mmap.MADV_REMOVE, first, last)
            self._huge = without(self._huge, [(first, last)])

    def _advise(self, advice: int, first: int, last: int) -> None:
        self._map.madvise(advice, self._first + first, last - first)


def _is_granted() -> bool:
    """Whether a private mapping may be larger than the memory of the machine and of this process."""
    try:
        with open(_OVERCOMMIT) as setting:
            overcommits = setting.read().strip() != "2"
    except OSError:
        return False
    return overcommits and resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


@functools.cache
def _are_copies_told() -> bool:
    """Whether this process can find the pages that it has written. A write that nobody finds would hide what the server
    writes there, for as long as the process lives."""
    try:
        Pagemap()
    except OSError:
        return False
    return True


def pages_of(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages of these bytes (start, stop), as ranges in ascending order."""
    page = mmap.PAGESIZE
    return merged((start - start % page, -(-stop // page) * page) for start, stop in ranges)


def _mapped(descriptor: int, nbytes: int, protection: int, kind: int) -> tuple[mmap.mmap, int]:
    """A mapping, and the offset at which the file begins in it: at an address that allows huge pages, if possible.
    Raises OSError, ValueError and OverflowError."""
    try:
        room = mmap.mmap(-1, nbytes + _HUGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, protection)
    except (OSError, OverflowError):  # there is no room for 2 MiB more, or unaccounted memory is not allowed
        return mmap.mmap(descriptor, nbytes, kind, protection), 0
    address: int = np.frombuffer(room, np.uint8).__array_interface__["data"][0]
    first = -address % _HUGE_NBYTES
    # The file is mapped over this room, and is unmapped with it.
    if _mmap(address + first, nbytes, protection, kind | _MAP_FIXED, descriptor, 0) != address + first:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return room, first
