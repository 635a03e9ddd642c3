"""The link over TCP between a gateway and an outpost, the process that stands for the service where one of its workers
runs. Codes 150-153."""

from __future__ import annotations

from cs_proto.records import Count, Frame, Record, Seconds, record

from .shared import Error

#: Bytes of a session's name.
SESSION_NBYTES = 16

#: What follows a piece of an :class:`Envelope`: the rest of its part, the next part of its item, or the next item.
PART_GOES_ON, PART_ENDS, ITEM_ENDS = 0, 1, 2
_ENDS = bytes((PART_GOES_ON, PART_ENDS, ITEM_ENDS))


class OfSession(Record):
    """Base of the records of one session between a gateway and an outpost, which is named by 16 random bytes."""

    session: bytes

    def check(self) -> None:
        if len(self.session) != SESSION_NBYTES:
            self.refuse(f"the name of a session has {SESSION_NBYTES} bytes, not {len(self.session)}")


@record(150)
class OpenLink(OfSession):
    """Outpost to gateway, first message of every connection: begin ``session``, or continue it after its connection was
    cut. ``is_new`` until the gateway has answered once. ``heard`` is the number of the last envelope that has arrived.

    ``connection`` counts the connections of the session from 1: an earlier one that comes late is refused. A
    session is named by 16 random bytes. ``protocol`` stays the first field in every version.
    """

    protocol: Count
    session: bytes
    is_new: bool
    heard: Count
    connection: Count = 1


@record(151)
class LinkOpened(OfSession):
    """Gateway's answer to :class:`OpenLink`: envelopes may be sent. ``heard`` is as there. If one end hears nothing of
    the other one for ``return_timeout``, the session is over."""

    session: bytes
    heard: Count
    return_timeout: Seconds


@record(152)
class Envelope(OfSession):
    """Outpost and gateway to each other: items, in order, as pieces of their parts.

    The first part of an item is its kind, one byte. ``ends`` has a byte for each piece: 0 if its part goes on in the
    next piece, 1 if the part ends, 2 if the item ends, too. A part may go on in the next envelope. ``number`` counts
    the sender's envelopes from 1; an envelope without pieces has the number 0. ``heard`` is the number of the last
    envelope that has arrived. At most two envelopes are sent that the other end has not heard.
    """

    session: bytes
    number: Count
    heard: Count
    ends: bytes
    pieces: tuple[bytes | Frame, ...]

    def check(self) -> None:
        super().check()
        if len(self.ends) != len(self.pieces) or self.ends.strip(_ENDS):
            self.refuse(f"{len(self.pieces)} pieces with {len(self.ends)} ends, each from 0 to 2")
        if bool(self.number) != bool(self.pieces):
            self.refuse(f"number {self.number} with {len(self.pieces)} pieces")


@record(153)
class CloseLink(OfSession):
    """Outpost to gateway: the session is over, and ``error`` says why. Not answered."""

    session: bytes
    error: Error
