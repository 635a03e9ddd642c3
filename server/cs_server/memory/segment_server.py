"""Bytes for peers that cannot map segments: they fetch and put what other processes read and write in shared memory.

This is only transport, so the engine is asked only for the identity of a peer. The rights are those that the supervisor
gives with a descriptor: to read every segment, and to write one's own. Both requests may be repeated. The service calls
this module between two commits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from cs_proto.arrays import Array, Location, array_of
from cs_proto.codec import LIMITS
from cs_proto.errors import ContextError, InvalidArgumentError, ShutdownError
from cs_proto.failures import error_of
from cs_proto.messages import Done, Fetch, Fetched, Put, Refused
from cs_proto.records import Record
from cs_runtime.shared_memory.mapping import Mapping

__all__ = ["carry"]


class _Segments(Protocol):
    def get(self, name: str) -> Mapping:
        """The segment of that name."""

    def view(self, array: Array) -> np.ndarray:
        """The array of a descriptor."""

    def writer(self, name: str) -> str:
        """The process that may write the segment."""


def carry(request: Fetch | Put, writer: Callable[[], str], segments: _Segments) -> Record:
    """The answer to ``request`` of the peer ``writer()``, which raises if the peer may not ask."""
    try:
        if isinstance(request, Fetch):
            writer()
            return Fetched(request.request, array_of(_fetched(request, segments)))
        _put(request, writer(), segments)
        return Done(request.request, 0, 0)
    except ShutdownError:
        raise
    except Exception as error:  # noqa: BLE001  (no request of a peer may end the server)
        return Refused(request.request, error_of(error))


def _fetched(request: Fetch, segments: _Segments) -> np.ndarray:
    view = segments.view(request.array)
    if request.rows is not None:
        rows = segments.view(request.rows)
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < len(view):
            raise InvalidArgumentError(
                f"rows {rows.min()} to {rows.max()} were asked for, but the array has {len(view)} rows"
            )
        if len(rows) > 1:
            _check_size(len(rows) * view[:1].nbytes)
        view = view[rows]
    else:
        _check_size(view.nbytes)
    return view


def _put(request: Put, writer: str, segments: _Segments) -> None:
    assert isinstance(request.array.place, Location)
    name, start = request.array.place.segment, request.array.place.offset
    if segments.writer(name) != writer:
        raise ContextError(f"{writer} may not write segment {name}")
    mapping, target = segments.get(name), segments.view(request.array)
    if request.value is None:
        mapping.discard(start, start + request.array.nbytes)
    else:
        mapping.reserve(start, start + request.array.nbytes)
        target[...] = segments.view(request.value)


def _check_size(nbytes: int) -> None:
    if nbytes > LIMITS.frame_nbytes:
        raise InvalidArgumentError(
            f"{nbytes} bytes were asked for, but one message carries at most {LIMITS.frame_nbytes}"
        )
