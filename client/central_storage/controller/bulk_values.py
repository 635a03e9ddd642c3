"""Many values at once: what lies side by side in a segment is read in one piece, and small values are sent in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from central_storage.core.backends import Column
from cs_proto.arrays import Array, Location
from cs_proto.memory_plan import room_of
from cs_runtime.shared_memory import mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment

__all__ = ["LARGE_NBYTES", "Place", "Sent", "image", "in_parts", "readers"]

_Segment: TypeAlias = "mapping.Mapping | RemoteSegment"

#: A value of more bytes is sent by itself.
LARGE_NBYTES = 1 << 20
# Values are fetched from a segment that is not mapped in pieces of about this many bytes.
_PART_NBYTES = 16 << 20
# One request has at most so many bytes of values, with what lies between them, and so many values: the server limits
# the lists of a message.
_SENT_NBYTES = 32 << 20
_SENT_VALUES = 1 << 16


class Place(NamedTuple):
    """Where a value lies: as :class:`~cs_proto.arrays.Array`, which takes longer to make."""

    segment: str
    offset: int
    nbytes: int


def readers(
    places: Sequence[Place], segment: Callable[[str, int], _Segment], *, copied: bool
) -> list[Callable[[], Any]]:
    """What reads the bytes of each place. If ``copied``, they are copied now, and else when they are read. What is read
    from mapped memory later is no copy. ``segment`` gives a segment by its name, with at least so many bytes."""
    ends: dict[str, int] = {}
    for name, offset, nbytes in places:
        ends[name] = max(ends.get(name, 0), offset + nbytes)
    sources = {name: segment(name, end) for name, end in ends.items()}
    if not copied and all(isinstance(source, mapping.Mapping) for source in sources.values()):
        memories = {name: source.memory for name, source in sources.items() if isinstance(source, mapping.Mapping)}
        return [partial(memories[name].__getitem__, slice(offset, offset + nbytes)) for name, offset, nbytes in places]
    found: dict[Place, Callable[[], Any]] = {}
    for piece in _side_by_side(sorted(places), None if copied else _PART_NBYTES):
        run = _Run(sources[piece[0].segment], piece)
        if copied:
            run.copy()
        for place in piece:
            found[place] = partial(run.read, place)
    return [found[place] for place in places]


def _side_by_side(places: Sequence[Place], most: int | None) -> Iterator[list[Place]]:
    """The places, which are sorted, in pieces without a hole; a piece of several has at most so many bytes."""
    piece: list[Place] = []
    end = 0
    for place in places:
        is_next = bool(piece) and place.offset == end and place.segment == piece[0].segment
        if piece and (not is_next or (most is not None and end + place.nbytes - piece[0].offset > most)):
            yield piece
            piece = []
        piece.append(place)
        end = place.offset + room_of(place.nbytes)
    if piece:
        yield piece


class _Run:
    """Values that lie side by side, and are read together."""

    def __init__(self, segment: _Segment, places: Sequence[Place]) -> None:
        self._segment = segment
        self._first = places[0].offset
        self._nbytes = places[-1].offset + places[-1].nbytes - self._first
        self._left = len(places)
        self._bytes: memoryview | None = None

    def copy(self) -> memoryview:
        """The bytes, which are copied once."""
        if self._bytes is None:
            view = self._segment.view(Array("uint8", (self._nbytes,), Location(self._segment.name, self._first)))
            self._bytes = (view if isinstance(self._segment, RemoteSegment) else view.copy()).data
        return self._bytes

    def read(self, place: Place) -> memoryview:
        """One of the values. When all have been read, only they keep the bytes."""
        start = place.offset - self._first
        found = self.copy()[start : start + place.nbytes]
        self._left -= 1
        if not self._left:
            self._bytes = None
        return found


class Sent(NamedTuple):
    """A part of a column: numbers, and the bytes of their values."""

    optimizer: int
    slot: str
    values: Sequence[tuple[int, memoryview]]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers alone."""
        return tuple(number for number, _ in self.values)


def in_parts(columns: Sequence[tuple[Column, Sequence[memoryview]]]) -> Iterator[list[Sent]]:
    """The values in the order in which they lie: variables first, then slot by slot; in parts that fit one request."""
    part: list[Sent] = []
    nbytes = count = 0
    for column, found in sorted(columns, key=lambda each: (each[0].optimizer, each[0].slot)):
        values = sorted(zip(column.numbers, found, strict=True))
        first = 0
        for place, (_, value) in enumerate(values):
            room = room_of(len(value))
            if count and (nbytes + room > _SENT_NBYTES or count == _SENT_VALUES):
                yield [*part, Sent(column.optimizer, column.slot, values[first:place])]
                part, nbytes, count, first = [], 0, 0, place
            nbytes += room
            count += 1
        if values:
            part.append(Sent(column.optimizer, column.slot, values[first:]))
    if part:
        yield part


def image(part: Sequence[Sent]) -> np.ndarray:
    """The bytes of the values, each at a multiple of 64, with zeros in between."""
    pieces: list[memoryview | bytes] = []
    for sent in part:
        for _, value in sent.values:
            pieces.append(value)
            if gap := room_of(len(value)) - len(value):
                pieces.append(bytes(gap))
    return np.frombuffer(b"".join(pieces), np.uint8)
