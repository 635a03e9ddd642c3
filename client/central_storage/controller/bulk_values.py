"""Many values at once: what lies side by side in a segment is read in one piece, and small values are sent in one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from central_storage.core.backends import Column
from cs_proto.arrays import Array, Location, item_nbytes
from cs_proto.memory_plan import room_of
from cs_runtime.shared_memory import mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment

__all__ = ["LARGE_NBYTES", "Place", "Sent", "image", "in_parts", "place_of", "readers", "row_reader", "slot_places"]

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


class Place(NamedTuple):
    """Where a value lies: as :class:`~cs_proto.arrays.Array`, which takes longer to make."""

    segment: str
    offset: int
    nbytes: int


def place_of(array: Array) -> Place:
    """Where an array lies."""
    assert isinstance(array.place, Location)
    return Place(array.place.segment, array.place.offset, item_nbytes(array.dtype) * math.prod(array.shape))


def slot_places(
    slots: Column, beside: Sequence[Place], segments: Mapping[tuple[str, str], str], is_rowwise: bool
) -> list[Place]:
    """Where slots lie: each begins where its variable does."""
    sizes = [place.nbytes for place in beside]
    if is_rowwise:
        itemsize = item_nbytes(slots.dtype)
        sizes = [itemsize * math.prod(shape) for shape in slots.shapes]
    return [
        Place(segments[slots.slot, place.segment], place.offset, nbytes)
        for place, nbytes in zip(beside, sizes, strict=True)
    ]


def row_reader(segment: Callable[[str, int], _Segment], place: Place, height: int) -> Callable[[int, int], memoryview]:
    """What reads the bytes of rows, from one number to below another, of an array of ``height`` rows at ``place``. What
    is read from mapped memory is no copy. ``segment``: as for :func:`readers`."""
    source, row_nbytes = segment(place.segment, place.offset + place.nbytes), place.nbytes // height

    def read(first: int, stop: int) -> memoryview:
        there = Location(place.segment, place.offset + first * row_nbytes)
        return source.view(Array("uint8", ((stop - first) * row_nbytes,), there)).data

    return read


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
