"""The memory of one direction of a mailbox: a ring of bytes, with one writer and one reader, and a mark.

A message that is too large, or that finds the ring full, does not go through it. Each message in a ring says how many
messages of the same sender went elsewhere before it, so the reader can restore the order in which they were sent.

A *mark* is a number, and up to :data:`~cs_proto.codec.MARK_NBYTES` bytes, that the writer leaves for the reader beside
the ring. The next mark takes the place of the one before, seen or not, and a mark has no order with messages. It costs
few stores and loads. A writer that gives a mark bytes must know that the mark before was taken.

Stores must not be reordered with stores, nor loads with loads. :data:`IS_ORDERED` says whether the machine guarantees
that, as x86-64 does.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from cs_proto.codec import MARK_NBYTES
from cs_proto.errors import PeerProtocolError
from cs_proto.records import Buffer

__all__ = [
    "BODY",
    "HEAD",
    "IS_ORDERED",
    "LEFT",
    "MARK",
    "MARK_NBYTES",
    "NBYTES",
    "SLEEPS",
    "Incoming",
    "Mark",
    "Outgoing",
]

#: Whether this machine orders memory accesses as mailboxes need it.
IS_ORDERED = os.uname().machine in ("x86_64", "AMD64")

# These four words of 8 bytes are 512 bytes apart, so that no two share a cache line or one that is prefetched with it.
_WORDS_NBYTES = 4096
HEAD, _TAIL, SLEEPS, LEFT = 0, 64, 128, 192
# The mark lies in the cache line of the head, at which a polling reader looks anyway. 0 before the first one.
MARK = 1
# The number of bytes of the mark, then these bytes.
BODY = 256
# Messages begin at multiples of this.
_UNIT = 64
#: Memory of a mailbox: two rings of 256 KiB. A message takes at most half of one, since it is never cut in two.
NBYTES = 2 * (_WORDS_NBYTES + 256 * 1024)

# The number of messages that went elsewhere before; the bytes of the message; the number of parts. The length of each
# part follows. A message has one part at least.
_PREFIX = struct.Struct("<QII")
_PREFIX_OF_ONE = struct.Struct("<QIII")


class _Prefixes(dict[int, struct.Struct]):
    """The prefix and the lengths of messages, by their number of parts."""

    def __missing__(self, count: int) -> struct.Struct:
        return struct.Struct(f"<QII{count}I")


_PREFIXES = _Prefixes({count: struct.Struct(f"<QII{count}I") for count in range(9)})


class Mark(NamedTuple):
    """A mark that was taken."""

    number: int
    body: bytes


# The constructor of a NamedTuple is a function of Python; this one is not.
_made_mark = partial(tuple.__new__, Mark)


class Outgoing:
    """The writer's end of a ring."""

    def __init__(self, memory: memoryview) -> None:
        """``memory`` (uint8, writable) is zero at first. Its first page holds the words; the rest holds messages and is
        a multiple of 128 bytes."""
        self.words = memory[:_WORDS_NBYTES].cast("Q")
        self._body = _body(memory)
        self._data = memory[_WORDS_NBYTES:]
        self._nbytes = len(self._data)
        self._head = 0
        self._tail = 0  # as last read from the words

    def mark(self, number: int, body: Buffer = b"") -> bool:
        """Leave a number for the reader, from 1 to 2**63 - 1 and not the one before, and bytes. False if these are too
        many, or if the reader has left."""
        words, size = self.words, len(body)
        if words[LEFT] or size > MARK_NBYTES:
            return False
        if size or words[BODY]:
            words[BODY] = size
            self._body[:size] = body
        words[MARK] = number
        return True

    @property
    def last(self) -> int:
        """The number of the last mark; 0 if there was none."""
        return self.words[MARK]

    def post(self, parts: Sequence[Buffer], elsewhere: int) -> bool:
        """Write a message that follows ``elsewhere`` messages that went elsewhere. False if it is too large, if there
        is no room, or if the reader has left."""
        words = self.words
        if words[LEFT]:
            return False
        count, header = len(parts), parts[0]
        if is_plain := count == 1 and type(header) is bytes:
            lengths = [nbytes := len(header)]
        else:
            lengths = [len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts]
            nbytes = sum(lengths)
        size = _PREFIX.size + 4 * count + nbytes
        if 2 * size > self._nbytes:
            return False
        head = self._head
        start, room = head % self._nbytes, size + -size % _UNIT
        skipped = self._nbytes - start if start + size > self._nbytes else 0
        if head + skipped + room - self._tail > self._nbytes:
            self._tail = words[_TAIL]
            if head + skipped + room - self._tail > self._nbytes:
                return False
        if skipped:
            _PREFIX.pack_into(self._data, start, 0, 0, 0)
            start = 0
        _PREFIXES[count].pack_into(self._data, start, elsewhere, size, count, *lengths)
        self._data[start + size - nbytes : start + size] = header if is_plain else b"".join(parts)
        self._head = words[HEAD] = head + skipped + room
        return True


class Incoming:
    """The reader's end of a ring."""

    def __init__(self, memory: memoryview) -> None:
        """As :class:`Outgoing`."""
        self.words = memory[:_WORDS_NBYTES].cast("Q")
        #: The position in the stream of bytes up to which messages were taken.
        self.tail = 0
        #: The number of the last mark that was taken.
        self.mark = 0
        self._body = _body(memory)
        self._data = memory[_WORDS_NBYTES:]
        self._nbytes = len(self._data)

    @property
    def has_mail(self) -> bool:
        """Whether something has been posted and not taken."""
        return self.words[HEAD] != self.tail

    def take_mark(self) -> Mark | None:
        """The last mark; None if it was taken before, or there is none."""
        mark = self.words[MARK]
        if mark == self.mark:
            return None
        self.mark = mark
        size = self.words[BODY]  # no writer leaves more than the body has room for
        return _made_mark((mark, bytes(self._body[:size]) if size else b""))

    def take(self, elsewhere: int) -> list[bytes] | None:
        """The parts of the next message, or None. ``elsewhere`` messages that went elsewhere have arrived; a message
        that was posted after more of them has to wait.

        Raises :class:`PeerProtocolError` if the memory holds bytes that no writer writes. The ring is unusable then.
        """
        head, tail = self.words[HEAD], self.tail
        if head == tail:
            return None
        start, there = tail % self._nbytes, head - tail
        if there > self._nbytes or there <= 0 or there % _UNIT:
            raise _damaged()
        before, size, count, first = _PREFIX_OF_ONE.unpack_from(self._data, start)
        if not count:
            tail += self._nbytes - start
            start, there = 0, head - tail
            if there <= 0:
                raise _damaged()
            before, size, count, first = _PREFIX_OF_ONE.unpack_from(self._data, 0)
        if before > elsewhere:
            return None
        at = start + _PREFIX.size + 4 * count
        end = start + size
        if not count or size > there or at > end or end > self._nbytes:
            raise _damaged()
        lengths = _PREFIXES[count].unpack_from(self._data, start)[3:] if count > 1 else ()
        if at + (sum(lengths) if lengths else first) != end:
            raise _damaged()
        parts = []
        for length in lengths[:-1]:
            parts.append(bytes(self._data[at : at + length]))
            at += length
        parts += [bytes(self._data[at:end])]
        self.tail = self.words[_TAIL] = tail + size + -size % _UNIT
        return parts

    def leave(self) -> None:
        """Make the writer send later messages elsewhere: it may be alive although it is thought dead."""
        self.words[LEFT] = True


def _body(memory: memoryview) -> memoryview:
    """Where the bytes of a mark lie."""
    return memory[8 * (BODY + 1) :][:MARK_NBYTES]


def _damaged() -> PeerProtocolError:
    return PeerProtocolError("its mailbox is damaged; something has written over that memory")
