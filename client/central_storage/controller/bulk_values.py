"""Many values at once: what lies side by side in a segment is read in one piece, and small values are sent in one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from central_storage.core.backends import Column, Value
from cs_proto.arrays import Array, Location, item_nbytes
from cs_proto.memory_plan import room_of
from cs_runtime.shared_memory import mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment

__all__ = ["LARGE_NBYTES", "Place", "Sent", "image", "in_parts", "place_of", "row_reader", "slot_places", "values_at"]

_Segment: TypeAlias = "mapping.Mapping | RemoteSegment"

#: A value of more bytes is sent by itself.
LARGE_NBYTES = 1 << 20
# Values are fetched from a segment that is not mapped in pieces of about this many bytes.
_PART_NBYTES = 16 << 20
# One request has at most so many bytes of values, with what lies between them, and so many values: the server limits
# the lists of a message.
_SENT_NBYTES = 32 << 20
_SENT_VALUES = 1 << 16
# A part of a column has at most so many values.
_CUT_VALUES = 1 << 12


Place: TypeAlias = "tuple[str, int, int]"
"""Where a value lies: the segment, the offset and the bytes. Thousands are made at once."""


def place_of(array: Array) -> Place:
    """Where an array lies."""
    assert isinstance(array.place, Location)
    return array.place.segment, array.place.offset, item_nbytes(array.dtype) * math.prod(array.shape)


def slot_places(slots: Column, beside: Sequence[Place], segments: Mapping[str, str]) -> list[Place]:
    """Where slots lie: each begins where its variable does. ``segments``: of the slots, by that of the variables."""
    return [
        (segments[segment], offset, nbytes) for (segment, offset, _), nbytes in zip(beside, slots.nbytes(), strict=True)
    ]


def row_reader(segment: Callable[[str, int], _Segment], place: Place, height: int) -> Callable[[int, int], memoryview]:
    """What reads the bytes of rows, from one number to below another, of an array of ``height`` rows at ``place``. What
    is read from mapped memory is no copy. ``segment``: as for :func:`values_at`."""
    name, offset, nbytes = place
    source, row_nbytes = segment(name, offset + nbytes), nbytes // height

    def read(first: int, stop: int) -> memoryview:
        there = Location(name, offset + first * row_nbytes)
        return source.view(Array("uint8", ((stop - first) * row_nbytes,), there)).data

    return read


def values_at(places: Sequence[Place], segment: Callable[[str, int], _Segment], *, copied: bool) -> list[Value]:
    """The bytes of each place, or what reads them. If ``copied``, they are copied now. If not, those in mapped memory
    are no copy, and others are read when they are needed. ``segment`` gives a segment by its name, with at least so
    many bytes."""
    ends: dict[str, int] = {}
    for name, offset, nbytes in places:
        if offset + nbytes > ends.get(name, -1):
            ends[name] = offset + nbytes
    sources = {name: segment(name, end) for name, end in ends.items()}
    if not copied and all(isinstance(source, mapping.Mapping) for source in sources.values()):
        memories = {name: source.memory for name, source in sources.items() if isinstance(source, mapping.Mapping)}
        return [memories[name][offset : offset + nbytes] for name, offset, nbytes in places]
    found: dict[Place, Value] = {}
    for piece in _side_by_side(sorted(places), None if copied else _PART_NBYTES):
        run = _Run(sources[piece[0][0]], piece)
        if copied:
            run.copy()
        for place in piece:
            found[place] = partial(run.read, place)
    return [found[place] for place in places]


def _side_by_side(places: Sequence[Place], most: int | None) -> Iterator[list[Place]]:
    """The places, which are sorted, in pieces without a hole; a piece of several has at most so many bytes."""
    piece: list[Place] = []
    begin = end = 0
    before = ""
    for place in places:
        segment, offset, nbytes = place
        if piece and (offset != end or segment != before or (most is not None and end + nbytes - begin > most)):
            yield piece
            piece = []
        if not piece:
            begin, before = offset, segment
        piece.append(place)
        end = offset + room_of(nbytes)
    if piece:
        yield piece


class _Run:
    """Values that lie side by side, and are read together."""

    def __init__(self, segment: _Segment, places: Sequence[Place]) -> None:
        _, last, nbytes = places[-1]
        self._segment = segment
        self._first = places[0][1]
        self._nbytes = last + nbytes - self._first
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
        _, offset, nbytes = place
        start = offset - self._first
        found = self.copy()[start : start + nbytes]
        self._left -= 1
        if not self._left:
            self._bytes = None
        return found


class Sent(NamedTuple):
    """A part of a column: numbers, the bytes of each value, and the values one after the other."""

    optimizer: int
    slot: str
    numbers: list[int]
    nbytes: list[int]
    values: memoryview


def in_parts(columns: Sequence[tuple[Column, memoryview]]) -> Iterator[list[Sent]]:
    """The values in the order in which they lie: variables first, then slot by slot; in parts that fit one request."""
    kinds: dict[tuple[int, str, str], list[tuple[Column, memoryview]]] = {}
    for column, values in columns:
        kinds.setdefault((column.optimizer, column.slot, column.dtype), []).append((column, values))
    part: list[Sent] = []
    nbytes = count = 0
    for _, columns in sorted(kinds.items(), key=lambda kind: kind[0][:2]):
        for sent in itertools.chain.from_iterable(itertools.starmap(_cut, _in_order(columns))):
            room = sum(many * room_of(each) for each, many in Counter(sent.nbytes).items())
            if part and (nbytes + room > _SENT_NBYTES or count + len(sent.numbers) > _SENT_VALUES):
                yield part
                part, nbytes, count = [], 0, 0
            part.append(sent)
            nbytes += room
            count += len(sent.numbers)
    if part:
        yield part


def _in_order(columns: list[tuple[Column, memoryview]]) -> list[tuple[Column, memoryview]]:
    """Columns of one kind, in ascending order of the numbers."""
    columns.sort(key=lambda each: each[0].numbers[:1])
    numbers = [number for column, _ in columns for number in column.numbers]
    if numbers == sorted(numbers):
        return columns
    shapes = [shape for column, _ in columns for shape in column.shapes]
    whole, data = replace(columns[0][0], numbers=numbers, shapes=shapes), b"".join(values for _, values in columns)
    ends = list(itertools.accumulate(whole.nbytes(), initial=0))
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    return [(whole.part(order), memoryview(b"".join(data[ends[at] : ends[at + 1]] for at in order)))]


def _cut(column: Column, values: memoryview) -> Iterator[Sent]:
    """A column in parts of at most so many values and so many bytes, which one value may exceed."""
    sizes = column.nbytes()
    if len(sizes) <= _CUT_VALUES and len(values) <= LARGE_NBYTES:
        if sizes:
            yield Sent(column.optimizer, column.slot, column.numbers, sizes, values)
        return
    first = begin = end = 0
    for at, nbytes in enumerate(sizes):
        if at > first and (at - first == _CUT_VALUES or end + nbytes - begin > LARGE_NBYTES):
            yield Sent(column.optimizer, column.slot, column.numbers[first:at], sizes[first:at], values[begin:end])
            first, begin = at, end
        end += nbytes
    if sizes:
        yield Sent(column.optimizer, column.slot, column.numbers[first:], sizes[first:], values[begin:])


def image(sent: Sent) -> np.ndarray:
    """The bytes of the values, each at a multiple of 64, with zeros in between and at the end."""
    if all(room_of(nbytes) == nbytes for nbytes in set(sent.nbytes)):
        return np.frombuffer(sent.values, np.uint8)
    pieces: list[memoryview | bytes] = []
    at = 0
    for nbytes in sent.nbytes:
        pieces.append(sent.values[at : at + nbytes])
        pieces.append(bytes(room_of(nbytes) - nbytes))
        at += nbytes
    return np.frombuffer(b"".join(pieces), np.uint8)
