"""What the mark of a worker says: a Return that equals an earlier one but for its run, its value, and the places and
numbers of the rows of its sparse gradients.

The number of the mark is that of the run. Its bytes are the number of the *base* and the body of the value. The base is
one of the last Returns that the worker has sent to this server as messages: both keep the same ones (:class:`Bases`).
Between the two are the number of the step, if the base has a name, and the :class:`Place` of each sparse gradient.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .descriptors import Array, Location
from .errors import PeerProtocolError
from .messages import ApplyPoint, Note, Return, SparseGradient, Value
from .records import altered

__all__ = [
    "BASES",
    "BASE_NBYTES",
    "PLACE_WORDS",
    "Bases",
    "Place",
    "are_alike",
    "base_of",
    "is_base",
    "marked",
    "places_of",
    "returned",
    "sparse_of",
    "value_at",
]

_BASE = struct.Struct("<Q")
_PLACE = struct.Struct("<3Q")
#: How many words of 8 bytes a :class:`Place` takes.
PLACE_WORDS = 3
#: Bytes of the number of the base.
BASE_NBYTES = _BASE.size
# A larger number in a mark is nonsense, and is lowered to one that a record may have.
_MOST = (1 << 62) - 1
#: How many bases a worker and its server keep.
BASES = 8


class Place(NamedTuple):
    """Where the rows of a sparse gradient lie in the segment of the base, and how many there are."""

    rows: int
    #: The bytes at which the values and the indices begin.
    values: int
    indices: int


def is_base(record: Return) -> bool:
    """Whether a Return that is sent as a message is a base of the marks that follow: small, and of a step that may
    repeat. Another Return leaves the bases as they are."""
    if len(record.run) > 1 or record.error is not None or record.changes or record.value is None:
        return False
    if record.value.arrays or not all(type(note) is ApplyPoint for note in record.notes):
        return False
    arrays = [array for each in sparse_of(record.notes) for array in (each.values, each.indices)]
    return all(type(array.place) is Location for array in arrays)


def sparse_of(notes: Sequence[Note]) -> list[SparseGradient]:
    """The sparse gradients of a replica, in the order in which a mark has their places."""
    return [
        gradient
        for note in notes
        if isinstance(note, ApplyPoint)
        for update in note.updates
        for gradient in update.sparse
    ]


def places_of(notes: Sequence[Note]) -> Iterator[Place]:
    """The places of the sparse gradients of a base."""
    for each in sparse_of(notes):
        assert isinstance(each.values.place, Location)
        assert isinstance(each.indices.place, Location)
        yield Place(each.indices.shape[0], each.values.place.offset, each.indices.place.offset)


def marked(base: int, value: bytes, step: int | None = None, places: Sequence[Place] = ()) -> bytes:
    """The bytes of a mark. ``step``: of a base with a name.

    >>> marked(5, b"value")
    b'\\x05\\x00\\x00\\x00\\x00\\x00\\x00\\x00value'
    """
    named = b"" if step is None else _BASE.pack(step)
    packed = [_PLACE.pack(*place) for place in places] if places else ()
    return b"".join((_BASE.pack(base), named, *packed, value))


def base_of(body: bytes) -> int:
    """The number of the base that a mark with these bytes names; 0, which no run has, if it names none."""
    return int(_BASE.unpack_from(body)[0]) if len(body) >= BASE_NBYTES else 0


def returned(base: Return, run: int, body: bytes) -> Return:
    """The Return that the mark of ``run`` stands for. Its bytes name ``base``. What lies at the places is not
    checked."""
    offset, notes, end, at = base.offset, base.notes, value_at(base), BASE_NBYTES
    if base.name:
        offset, at = _number(body, at) - run, at + BASE_NBYTES
    if at < end:
        words = [_number(body, word) for word in range(at, end, BASE_NBYTES)]
        notes = _moved(notes, [Place(*words[n : n + PLACE_WORDS]) for n in range(0, len(words), PLACE_WORDS)])
    return altered(base, run=(run,), value=Value(body[end:], ()), offset=offset, notes=notes)


def value_at(base: Return) -> int:
    """Where the body of the value begins in the bytes of a mark that names ``base``."""
    return BASE_NBYTES * (2 if base.name else 1) + _PLACE.size * len(sparse_of(base.notes))


def _number(body: bytes, at: int) -> int:
    return min(int.from_bytes(body[at : at + BASE_NBYTES], "little"), _MOST)


def _moved(notes: Sequence[Note], places: Sequence[Place]) -> tuple[Note, ...]:
    """The notes with the sparse gradients at these places."""
    left, made = iter(places), []
    for note in notes:
        if isinstance(note, ApplyPoint) and any(update.sparse for update in note.updates):
            updates = []
            for update in note.updates:
                sparse = tuple([_at(gradient, next(left)) for gradient in update.sparse])
                updates.append(altered(update, sparse=sparse) if sparse else update)
            note = altered(note, updates=tuple(updates))
        made.append(note)
    return tuple(made)


def _at(gradient: SparseGradient, place: Place) -> SparseGradient:
    """The gradient at another place of the same segment."""

    def array(like: Array, offset: int) -> Array:
        assert isinstance(like.place, Location)
        return altered(like, shape=(place.rows, *like.shape[1:]), place=altered(like.place, offset=offset))

    values, indices = array(gradient.values, place.values), array(gradient.indices, place.indices)
    return altered(gradient, values=values, indices=indices)


def are_alike(notes: Sequence[Note], others: Sequence[Note]) -> bool:
    """Whether notes differ at most in the places and in the numbers of the rows of sparse gradients."""
    if notes == others:
        return True
    if len(notes) != len(others):
        return False
    for one, two in zip(notes, others, strict=True):
        if type(one) is not ApplyPoint or type(two) is not ApplyPoint or len(one.updates) != len(two.updates):
            return False
        if altered(one, updates=()) != altered(two, updates=()):
            return False
        for update, like in zip(one.updates, two.updates, strict=True):
            if altered(update, sparse=()) != altered(like, sparse=()) or len(update.sparse) != len(like.sparse):
                return False
            if not all(map(_is_elsewhere, update.sparse, like.sparse)):
                return False
    return True


def _is_elsewhere(gradient: SparseGradient, other: SparseGradient) -> bool:
    """Whether two gradients of one variable have rows of one kind in the same segments."""
    if gradient.variable != other.variable:
        return False
    for one, two in ((gradient.values, other.values), (gradient.indices, other.indices)):
        if type(one.place) is not Location or type(two.place) is not Location:
            return False
        kinds = (one.dtype, one.shape[1:], one.place.segment), (two.dtype, two.shape[1:], two.place.segment)
        if kinds[0] != kinds[1]:
            return False
    return True


class Bases:
    """The last :data:`BASES` Returns of one worker that its marks may name.

    The worker keeps each Return that it sends as a message, and the server each that it receives. ::

        bases = Bases()
        bases.keep(returned)  # True
        bases.get(returned.run[0])  # returned
    """

    def __init__(self) -> None:
        self._kept: dict[int, Return] = {}  # the oldest first

    def keep(self, record: Return) -> bool:
        """Keep a Return that is sent as a message, and whether it is a base. Others are not kept."""
        if not is_base(record):
            return False
        self._kept.pop(record.run[0], None)  # the next controller may use the number again
        self._kept[record.run[0]] = record
        if len(self._kept) > BASES:
            del self._kept[next(iter(self._kept))]
        return True

    def get(self, number: int) -> Return | None:
        """The base with this number, if it is kept."""
        return self._kept.get(number)

    def returned(self, run: int, body: bytes) -> Return:
        """The Return that the mark of ``run`` with these bytes stands for. What lies at its places is not checked.
        Raises PeerProtocolError if its base is not kept."""
        base = self.get(base_of(body))
        if base is None:
            raise PeerProtocolError(
                f"the mark of run {run} names a base that is none of the last Returns of this worker"
            )
        return returned(base, run, body)

    def find(self, series: int, lookahead: int, notes: Sequence[Note], count: int, name: str) -> Return | None:
        """The newest base of runs that bring this, which has no name or this one, wherever the rows of sparse gradients
        lie."""
        notes = tuple(notes)
        for base in reversed(self._kept.values()):
            is_like = (base.series, base.lookahead, base.count) == (series, lookahead, count)
            if is_like and base.name in ("", name) and (base.notes == notes or are_alike(base.notes, notes)):
                return base
        return None
