"""Many values at once: what lies side by side in a segment is read in one piece, and small values are sent in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from central_storage.core.backends import Target
from cs_proto.arrays import Array, Location
from cs_proto.memory_plan import room_of
from cs_runtime.shared_memory import mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment

__all__ = ["LARGE_NBYTES", "Place", "image", "in_parts", "readers"]

_Segment: TypeAlias = "mapping.Mapping | RemoteSegment"

#: A value of more bytes is sent by itself.
LARGE_NBYTES = 1 << 20
# Values are sent, and fetched from a segment that is not mapped, in pieces of about this many bytes.
_PART_NBYTES = 16 << 20


class Place(NamedTuple):
    """Where the value of a variable or slot lies: as :class:`~cs_proto.arrays.Array`, which takes longer to make."""

    target: Target
    segment: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def readers(
    places: Iterable[Place], segment: Callable[[str, int], _Segment], *, copied: bool
) -> dict[Target, Callable[[], np.ndarray]]:
    """What reads each of these arrays. If ``copied``, they are copied now, and else when they are read. What is read
    from mapped memory later is no copy. ``segment`` gives a segment by its name, with at least so many bytes."""
    found: dict[Target, Callable[[], np.ndarray]] = {}
    by_segment: dict[str, list[Place]] = {}
    for place in places:
        by_segment.setdefault(place.segment, []).append(place)
    for name, each in by_segment.items():
        source = segment(name, max(place.offset + place.nbytes for place in each))
        if isinstance(source, mapping.Mapping) and not copied:
            memory = source.memory
            for place in each:
                found[place.target] = partial(_view, place, memory)
            continue
        each.sort(key=_offset)
        for piece in _side_by_side(each, None if copied else _PART_NBYTES):
            run = _Run(source, piece)
            if copied:
                run.copy()
            for place in piece:
                found[place.target] = partial(run.read, place)
    return found


def _view(place: Place, memory: memoryview) -> np.ndarray:
    return np.ndarray(place.shape, place.dtype, memory, place.offset)


def _offset(place: Place) -> int:
    return place.offset


def _side_by_side(places: Sequence[Place], most: int | None) -> Iterator[list[Place]]:
    """The places, which are sorted, in pieces without a hole; a piece of several has at most so many bytes."""
    piece: list[Place] = []
    end = 0
    for place in places:
        if piece and (place.offset != end or (most is not None and end + place.nbytes - piece[0].offset > most)):
            yield piece
            piece = []
        piece.append(place)
        end = place.offset + room_of(place.nbytes)
    if piece:
        yield piece


class _Run:
    """Arrays that lie side by side, and are read together."""

    def __init__(self, segment: _Segment, places: Sequence[Place]) -> None:
        self._segment = segment
        self._first = places[0].offset
        self._nbytes = places[-1].offset + places[-1].nbytes - self._first
        self._left = len(places)
        self._bytes: np.ndarray | None = None

    def copy(self) -> np.ndarray:
        """The bytes, which are copied once."""
        if self._bytes is None:
            view = self._segment.view(Array("uint8", (self._nbytes,), Location(self._segment.name, self._first)))
            self._bytes = view if isinstance(self._segment, RemoteSegment) else view.copy()
        return self._bytes

    def read(self, place: Place) -> np.ndarray:
        """One of the arrays. When all have been read, only they keep the bytes."""
        found = np.ndarray(place.shape, place.dtype, self.copy().data, place.offset - self._first)
        self._left -= 1
        if not self._left:
            self._bytes = None
        return found


def in_parts(values: Sequence[tuple[Target, np.ndarray]]) -> Iterator[list[tuple[Target, np.ndarray]]]:
    """The values in the order in which they lie: variables first, then slot by slot; in parts that fit one request."""
    part: list[tuple[Target, np.ndarray]] = []
    nbytes = 0
    for target, value in sorted(values, key=lambda item: (item[0].optimizer, item[0].slot, item[0].number)):
        if part and nbytes + room_of(value.nbytes) > _PART_NBYTES:
            yield part
            part, nbytes = [], 0
        part.append((target, value))
        nbytes += room_of(value.nbytes)
    if part:
        yield part


def image(values: Sequence[tuple[Target, np.ndarray]]) -> np.ndarray:
    """The bytes of the values, each at a multiple of 64, with zeros in between."""
    whole = np.zeros(sum(room_of(value.nbytes) for _, value in values), np.uint8)
    memory, start = whole.data, 0
    for _, value in values:
        np.ndarray(value.shape, value.dtype, memory, start)[...] = value
        start += room_of(value.nbytes)
    return whole
