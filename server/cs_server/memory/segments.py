"""The segments of one server: the memory that the supervisor makes for it, mapped here.

This module owns every mapping of the server. It knows no variables and no messages of workers or clients. The service
uses it to make and view memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

from cs_proto.arrays import Array, Location, frame_view
from cs_proto.errors import MemoryPlanError, ShutdownError
from cs_proto.messages import ExtendSegment, MakeSegment, OpenSegment, Segment
from cs_proto.sizes import in_units
from cs_runtime import machine
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.transport.supervisor_link import SupervisorLink

__all__ = ["Segments"]


class Segments:
    """What the connection to the supervisor has brought."""

    def __init__(self, supervisor: SupervisorLink) -> None:
        #: Called with the old and the new mapping of a segment that was extended.
        self.on_extended: Callable[[Mapping, Mapping], None] = _nothing
        self._supervisor = supervisor
        self._mappings: dict[str, Mapping] = {}
        self._writers: dict[str, str] = {}
        self._elements: dict[tuple[str, str], np.ndarray] = {}

    def make(self, name: str, reservation: int, writer: str, stop: int = 0) -> Mapping:
        """The segment of that name, made if it does not exist, and extended to ``reservation`` bytes if it is shorter
        than ``stop`` bytes. Older mappings stay valid. Raises the error with which the supervisor refuses, and
        :class:`~cs_proto.errors.MemoryPlanError` if it cannot be mapped."""
        self._writers[name] = writer
        if name not in self._mappings:
            _check_addresses(name, reservation)
            self._map(MakeSegment(name, reservation, writer))
        if self._mappings[name].nbytes < stop:
            _check_addresses(name, reservation)
            self._map(ExtendSegment(name, reservation))
        return self._mappings[name]

    def get(self, name: str, stop: int = 0) -> Mapping:
        """The segment of that name, made earlier by this server or one before it. At least its first ``stop`` bytes are
        mapped, if it is that long.

        Raises :class:`~cs_proto.errors.InvalidArgumentError` if there is none.
        """
        if name not in self._mappings or self._mappings[name].nbytes < stop:
            self._map(OpenSegment(name))
        return self._mappings[name]

    def __contains__(self, name: str) -> bool:
        """Whether a segment of that name is mapped."""
        return name in self._mappings

    def writer(self, name: str) -> str:
        """The process other than the server that may write the segment: ``controller``, ``w0``, or empty if there is
        none."""
        return self._writers.get(name, "")

    def view(self, array: Array) -> np.ndarray:
        """The array of a descriptor: a read-only view of its frame, or a view of its segment."""
        if isinstance(array.place, Location):
            return self.get(array.place.segment, array.place.offset + array.nbytes).view(array)
        return frame_view(array)

    def use_huge_pages(self, array: Array) -> None:
        """The whole of an array is about to be written: see :meth:`Mapping.use_huge_pages`."""
        if isinstance(array.place, Location):
            start, stop = array.place.offset, array.place.offset + array.nbytes
            self.get(array.place.segment, stop).use_huge_pages(start, stop)

    def elements(self, name: str, dtype: str) -> np.ndarray:
        """A whole segment, in its current length, as a 1-D array of ``dtype``."""
        key = (name, dtype)
        if key not in self._elements:
            self._elements[key] = self.get(name).elements(dtype)
        return self._elements[key]

    def discard(self, name: str, start: int, stop: int) -> None:
        """Give the whole pages between two bytes of a segment back; they read as zeros afterwards. Bytes beyond the
        mapping, which could not be extended, were never touched."""
        mapping = self.get(name)
        mapping.discard(start, min(stop, mapping.nbytes))

    def close(self) -> None:
        """Forget the mappings. Mapped memory stays while something views it."""
        self._mappings.clear()
        self._elements.clear()

    def _map(self, request: MakeSegment | ExtendSegment | OpenSegment) -> None:
        try:
            segment, descriptors = self._supervisor.ask_for_segment(request)
        except TimeoutError as error:
            raise MemoryPlanError(str(error)) from error
        if not descriptors:
            raise ShutdownError(
                f"the supervisor did not share segment {request.segment} with this server; start the service again"
            )
        self._take(segment, descriptors[0])

    def _take(self, segment: Segment, descriptor: int) -> None:
        """Map the whole segment, unless it is mapped already."""
        name, nbytes = segment.segment, segment.reservation
        before = self._mappings.get(name)
        if before is not None and before.nbytes >= nbytes:
            os.close(descriptor)
            return
        try:
            mapping = Mapping(name, descriptor, nbytes, writable=segment.writable)
        except OSError as error:
            raise _cannot_map(name, nbytes, error) from error
        self._mappings[name] = mapping
        if before is not None:
            self._elements = {key: elements for key, elements in self._elements.items() if key[0] != name}
            self.on_extended(before, mapping)


def _nothing(before: Mapping, after: Mapping) -> None:
    pass


def _check_addresses(name: str, nbytes: int) -> None:
    """Raise MemoryPlanError if this process has fewer than ``nbytes`` addresses free: a segment cannot be made shorter
    again, and every process maps all of it."""
    try:
        mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ).close()
    except OSError as error:
        raise _cannot_map(name, nbytes, error) from error


def _cannot_map(name: str, nbytes: int, error: OSError) -> MemoryPlanError:
    return MemoryPlanError(
        f"the server cannot map segment {name} of {nbytes} bytes{in_units(nbytes)} ({error.strerror}): "
        f"{machine.addresses_left()}; allow shared mappings, raise the limit of addresses (ulimit -v) if there is "
        "one, or use smaller variables, fewer replicas or fewer optimizers"
    )
