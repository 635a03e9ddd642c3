"""What the mark of a worker says: a Return that equals an earlier one but for its run and its value.

The number of the mark is that of the run. Its bytes are the number of the *base* and the body of the value. The base is
one of the last Returns that the worker has sent to this server as messages: both keep the same ones (:class:`Bases`).
Between the two, if the base has a name, is the number of the step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .messages import ApplyPoint, Note, Return, Value
from .records import altered

__all__ = ["BASES", "BASE_NBYTES", "Bases", "base_of", "is_base", "marked", "returned", "value_of"]

_BASE = struct.Struct("<Q")
#: Bytes of the number of the base.
BASE_NBYTES = _BASE.size
_MOST_STEPS = (1 << 62) - 1
#: How many bases a worker and its server keep.
BASES = 8


def is_base(record: Return) -> bool:
    """Whether a Return that is sent as a message is a base of the marks that follow: small, and of a step that may
    repeat. Another Return leaves the bases as they are."""
    if len(record.run) > 1 or record.error is not None or record.changes or record.value is None:
        return False
    if record.value.arrays or not all(type(note) is ApplyPoint for note in record.notes):
        return False
    return not any(update.sparse for note in record.notes if isinstance(note, ApplyPoint) for update in note.updates)


def marked(base: int, value: bytes, step: int | None = None) -> bytes:
    """The bytes of a mark. ``step``: of a base with a name.

    >>> marked(5, b"value")
    b'\\x05\\x00\\x00\\x00\\x00\\x00\\x00\\x00value'
    """
    return _BASE.pack(base) + (b"" if step is None else _BASE.pack(step)) + value


def base_of(body: bytes) -> int:
    """The number of the base that a mark with these bytes names; 0, which no run has, if it names none."""
    return int(_BASE.unpack_from(body)[0]) if len(body) >= BASE_NBYTES else 0


def returned(base: Return, run: int, body: bytes) -> Return:
    """The Return that the mark of ``run`` stands for. Its bytes name ``base``."""
    if not base.name:
        return altered(base, run=(run,), value=value_of(base, body))
    step = min(int.from_bytes(body[BASE_NBYTES : 2 * BASE_NBYTES], "little"), _MOST_STEPS)
    return altered(base, run=(run,), value=value_of(base, body), offset=step - run)


def value_of(base: Return, body: bytes) -> Value:
    """The value in the bytes of a mark, which name ``base``."""
    return Value(body[2 * BASE_NBYTES if base.name else BASE_NBYTES :], ())


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
        self._kept.pop(record.run[0], None)  # another controller counts its runs from 1 again
        self._kept[record.run[0]] = record
        if len(self._kept) > BASES:
            del self._kept[next(iter(self._kept))]
        return True

    def get(self, number: int) -> Return | None:
        """The base with this number, if it is kept."""
        return self._kept.get(number)

    def find(self, series: int, lookahead: int, notes: Sequence[Note], count: int, name: str) -> Return | None:
        """The newest base of runs that bring this, which has no name or this one."""
        notes = tuple(notes)
        for base in reversed(self._kept.values()):
            is_like = (base.series, base.lookahead, base.count) == (series, lookahead, count)
            if is_like and base.name in ("", name) and base.notes == notes:
                return base
        return None
