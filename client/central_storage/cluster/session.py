"""One end of a session between a gateway and an outpost: items in order, each heard once, whatever a cut loses.

Items travel in envelopes, which are numbered. The sender keeps an envelope until the other end has heard it, and never
more than two, because a ROUTER keeps only so many messages for a peer that does not read. After a cut both ends say
what they have heard, and send the rest again. This module has no socket and no clock: callers pass the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

from cs_proto.codec import LIMITS, Limits, encode
from cs_proto.errors import LocalProtocolError, PeerProtocolError
from cs_proto.frozen import frozen
from cs_proto.messages import ITEM_ENDS, PART_ENDS, PART_GOES_ON, Envelope
from cs_proto.records import Buffer, Frame

__all__ = ["ENVELOPE_NBYTES", "HEARD_WITHIN", "MOST_UNHEARD", "Item", "Session"]

#: The kind of an item, one byte, and its parts.
Item = tuple[bytes, list[Buffer]]

# Seconds after which an end that has nothing to say sends an empty envelope.
_BEAT = 1.0
#: Seconds in which an end says that a small envelope has arrived. What it sends meanwhile says it as well, which saves
#: a message in most steps.
HEARD_WITHIN = 0.02
#: Bytes of the pieces of one envelope.
ENVELOPE_NBYTES = 4 << 20
#: Envelopes that are sent and not heard.
MOST_UNHEARD = 2

# A part of at most this size is never cut, so the receiver needs no copy of it.
_WHOLE_NBYTES = 1 << 20
# That an envelope of more bytes has arrived is said at once, because the other end may have more of them.
_SMALL_ENVELOPE_NBYTES = 64 << 10
# Pieces of at most this size stand in the header, which costs less than a frame.
_SMALL_NBYTES = 1024
_MOST_PIECES = 4000
# What an item may have beyond the message in it: its kind, and the name of a peer.
_MORE_NBYTES, _MORE_PARTS = 1024, 8


@frozen
class _Sent:
    """An envelope that the other end has not heard yet. Its bytes do not change any more."""

    number: int
    ends: bytes
    pieces: tuple[bytes | Frame, ...]
    nbytes: int


class Session:
    """One end of a session. Used by one thread."""

    def __init__(self, name: bytes, now: float, limits: Limits = LIMITS) -> None:
        """``limits`` are those of the messages that stand in received items."""
        #: 16 random bytes, which both ends know.
        self.name = name
        #: The number of the last envelope that has arrived.
        self.heard = 0
        #: Bytes of items that the other end has not heard.
        self.waiting = 0
        #: Seconds after which an empty envelope is sent if there is nothing to say.
        self.beat = _BEAT
        self._limits = limits
        self._queue: deque[tuple[int, Buffer]] = deque()
        self._made = 0  # the number of the last envelope
        self._unheard: deque[_Sent] = deque()
        self._sent = 0  # so many of them have been sent over this connection
        self._told = 0  # the last envelope of which the other end was told that it has arrived
        self._tells_at = math.inf  # when it is told of the others
        self._heard_at = self._sent_at = now
        self._part: list[Buffer] = []
        self._parts: list[Buffer] = []
        self._nbytes = 0  # of the item that has not ended

    def put(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        """Queue one item. What is not ``bytes`` is copied when its envelope is made, and may not change until then.

        Raises LocalProtocolError if ``kind`` is not one byte.
        """
        if len(kind) != 1:
            raise LocalProtocolError(f"the kind of an item is one byte, not {kind!r:.80}")
        buffers = [kind, *map(_bytes_of, parts)]
        self._queue.extend((PART_ENDS, buffer) for buffer in buffers[:-1])
        self._queue.append((ITEM_ENDS, buffers[-1]))
        self.waiting += sum(map(len, buffers))

    def envelopes(self, now: float) -> Iterator[list[Buffer]]:
        """The messages that may be sent now. Each counts as sent when the next one is asked for, so a caller that could
        not send one leaves the loop and gets it again later."""
        while self._sent < len(self._unheard) or self._make():
            envelope = self._unheard[self._sent]
            yield self._message(envelope.number, envelope.ends, envelope.pieces)
            self._sent += 1
            self._has_sent(now)
        if now >= self._next_sign():
            yield self.beat_message()
            self._has_sent(now)

    def due(self, now: float) -> float:
        """Seconds until :meth:`envelopes` has a message, if nothing is put and nothing is heard."""
        may_make = bool(self._queue) and len(self._unheard) < MOST_UNHEARD
        if may_make or self._sent < len(self._unheard):
            return 0.0
        return max(0.0, self._next_sign() - now)

    def hear(self, envelope: Envelope, now: float) -> list[Item]:
        """The items that are complete with this envelope, in order. An envelope that has arrived before has none.

        Raises PeerProtocolError if an envelope is missing before this one, if the other end claims to have heard what
        was not sent, or for an item beyond the limits. The session cannot go on then.
        """
        self._heard_at = now
        self._forget(envelope.heard)
        if not envelope.number:
            return []
        if envelope.number <= self.heard:
            self._tells_at = now
            return []
        if envelope.number != self.heard + 1:
            raise PeerProtocolError(f"envelope {envelope.number} came after envelope {self.heard}")
        self.heard = envelope.number
        is_small = sum(map(_nbytes_of, envelope.pieces)) <= _SMALL_ENVELOPE_NBYTES
        may_come_more = self.heard - self._told < MOST_UNHEARD  # before the other end is told
        self._tells_at = min(self._tells_at, now + HEARD_WITHIN) if is_small and may_come_more else now
        return list(self._items(envelope))

    def resume(self, heard: int, now: float) -> None:
        """There is a new connection, and the other end has heard the envelope ``heard`` last: send the rest again.

        Raises PeerProtocolError if it has claimed to have heard more before, or has heard what was not sent.
        """
        known = self._made - len(self._unheard)
        if heard < known:
            raise PeerProtocolError(f"the other end had heard envelope {known}, and now only {heard}")
        self._heard_at = now
        self._sent = len(self._unheard)  # all of them may have arrived
        self._forget(heard)
        self._sent = 0
        # The message that continues the session says what has arrived.
        self._told, self._tells_at = self.heard, math.inf

    def beat_message(self) -> list[Buffer]:
        """An empty envelope: a sign of life, which says what has arrived."""
        return self._message(0, b"", ())

    def silence(self, now: float) -> float:
        """Seconds since something was heard."""
        return now - self._heard_at

    def _message(self, number: int, ends: bytes, pieces: tuple[bytes | Frame, ...]) -> list[Buffer]:
        return encode(Envelope(self.name, number, self.heard, ends, pieces))

    def _has_sent(self, now: float) -> None:
        self._told, self._tells_at = self.heard, math.inf
        self._sent_at = now

    def _next_sign(self) -> float:
        """When an empty envelope is sent if nothing else is."""
        return min(self._tells_at, self._sent_at + self.beat)

    def _make(self) -> bool:
        """Make the next envelope of what waits. False if there is nothing, or enough is under way."""
        if not self._queue or len(self._unheard) >= MOST_UNHEARD:
            return False
        ends, nbytes = bytearray(), 0
        pieces: list[bytes | Frame] = []
        while self._queue and len(pieces) < _MOST_PIECES:
            end, buffer = self._queue[0]
            room = ENVELOPE_NBYTES - nbytes
            if len(buffer) <= room:
                self._queue.popleft()
            elif len(buffer) > _WHOLE_NBYTES and room >= _WHOLE_NBYTES:
                whole = memoryview(buffer)
                buffer, self._queue[0] = whole[:room], (end, whole[room:])
                end = PART_GOES_ON
            else:
                break
            piece = bytes(buffer)
            ends.append(end)
            pieces.append(piece if len(piece) <= _SMALL_NBYTES else Frame(piece))
            nbytes += len(piece)
        self._made += 1
        self._unheard.append(_Sent(self._made, bytes(ends), tuple(pieces), nbytes))
        return True

    def _forget(self, heard: int) -> None:
        """The other end has heard all envelopes up to this number."""
        last = self._made - len(self._unheard) + self._sent
        if heard > last:
            raise PeerProtocolError(f"the other end has heard envelope {heard}, and {last} was sent last")
        while self._unheard and self._unheard[0].number <= heard:
            self.waiting -= self._unheard.popleft().nbytes
            self._sent -= 1

    def _items(self, envelope: Envelope) -> Iterator[Item]:
        for end, piece in zip(envelope.ends, envelope.pieces, strict=True):
            buffer = piece.data if isinstance(piece, Frame) else piece
            self._part.append(buffer)
            self._nbytes += len(buffer)
            if self._nbytes > self._limits.message_nbytes + _MORE_NBYTES:
                raise PeerProtocolError(f"an item of more than {self._limits.message_nbytes} bytes")
            if len(self._part) > 2 + self._limits.message_nbytes // _WHOLE_NBYTES:
                raise PeerProtocolError(f"a part in {len(self._part)} pieces: they are too short")
            if end == PART_GOES_ON:
                continue
            self._parts.append(self._part[0] if len(self._part) == 1 else b"".join(self._part))
            self._part = []
            if len(self._parts) > self._limits.frames + _MORE_PARTS:
                raise PeerProtocolError(f"an item of more than {self._limits.frames} parts")
            if end == ITEM_ENDS:
                kind, *parts = self._parts
                self._parts, self._nbytes = [], 0
                if len(kind) != 1:
                    raise PeerProtocolError(f"an item whose kind has {len(kind)} bytes")
                yield bytes(kind), parts


def _nbytes_of(piece: bytes | Frame) -> int:
    return piece.nbytes if isinstance(piece, Frame) else len(piece)


def _bytes_of(part: Buffer) -> Buffer:
    """The same memory, with a length in bytes."""
    if type(part) is bytes:
        return part
    view = memoryview(part)
    return view.cast("B") if view.nbytes else b""
