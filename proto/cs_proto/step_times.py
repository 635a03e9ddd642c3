"""The layout of a ring of step times: where a process notes when it reaches the places of a step.

A ring is a segment of `NBYTES` with one writer. It begins with words of 8 bytes, each at its number here, and a table
of the names of spans; then come `CAPACITY` moments. Moment n, counted from 0 over the life of the segment, is in place
``n % CAPACITY`` and has two words: the time in nanoseconds of CLOCK_MONOTONIC, then its kind in the lowest 16 bits and
the lowest 32 bits of the number of its run in the uppermost. The writer stores the moment first and `WRITTEN` after it.
So a reader that copies a moment and then finds ``WRITTEN`` at most ``n + CAPACITY - 1`` has all of it as it was
written, on a processor whose loads and stores are seen in order. :mod:`cs_runtime.trace` is the writer.

The supervisor writes the word ``WATCHED``. While it is 0, the writer notes nothing, so a training that nobody looks at
pays for one load at each place.
"""

from __future__ import annotations

__all__ = [
    "BEGINS",
    "CAPACITY",
    "ENDS",
    "EPOCH",
    "FIRST",
    "KINDS",
    "MAGIC",
    "MARKER",
    "MOMENTS",
    "MOST_NAMES",
    "NAMES",
    "NAME_NBYTES",
    "NBYTES",
    "OTHER_SPANS",
    "PID",
    "PLACES",
    "RUN_SHIFT",
    "STARTED",
    "VERSION",
    "VERSION_NUMBER",
    "WATCHED",
    "WRITTEN",
    "name_of",
    "name_place",
    "packed_name",
]

NBYTES = 1 << 20

# The words at the beginning.
MAGIC, VERSION, PLACES, WRITTEN, EPOCH, NAMES, PID, WATCHED = range(8)
"""`MARKER`, once the segment has a writer; `VERSION_NUMBER`; `CAPACITY`; how many moments were written in all; the time
since 1970 in nanoseconds less that of CLOCK_MONOTONIC, when the writer began; how many names the table has; the number
of the process; whether anybody reads the ring now."""
MARKER = int.from_bytes(b"CStimes\n", "little")
VERSION_NUMBER = 1

# The table of names: UTF-8 after one byte with its length.
_TABLE, NAME_NBYTES = 64, 64
_HEAD_NBYTES = 8192
MOST_NAMES = (_HEAD_NBYTES - _TABLE) // NAME_NBYTES
OTHER_SPANS = "other spans"
"""The name of spans that the table has no place for."""
FIRST = _HEAD_NBYTES // 8
"""The word at which the moments begin."""
CAPACITY = (NBYTES - _HEAD_NBYTES) // 16

RUN_SHIFT = 32
MOMENTS = (
    "started",
    "woken",
    "found",
    "decoded",
    "called",
    "bound",
    "forward",
    "backward",
    "looked-up",
    "sliced",
    "applied",
    "returned",
    "sent",
    "decided",
    "committed",
    "begun",
    "pickled",
    "over",
    "prepared",
)
"""The names of the kinds from 1. ``started``: another process writes from here; its "run" is its process number."""
KINDS = {name: kind for kind, name in enumerate(MOMENTS, 1)}
STARTED = KINDS["started"]
BEGINS, ENDS = 1 << 14, 1 << 15
"""A span has two moments, with the number of its name added to these. Their "run" is the number of the thread."""


def name_place(number: int) -> slice:
    """The bytes of a name in the table."""
    return slice(_TABLE + number * NAME_NBYTES, _TABLE + (number + 1) * NAME_NBYTES)


def packed_name(name: str) -> bytes:
    """The bytes of the table for ``name``, of which the first 63 bytes are kept.

    >>> packed_name("forward")[:9]
    b'\\x07forward\\x00'
    """
    text = name.encode(errors="replace")[: NAME_NBYTES - 1]
    return (bytes([len(text)]) + text).ljust(NAME_NBYTES, b"\0")


def name_of(packed: bytes) -> str:
    """The name in these bytes of the table.

    >>> name_of(packed_name("forward"))
    'forward'
    """
    return packed[1 : 1 + packed[0]].decode(errors="replace")
