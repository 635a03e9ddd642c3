"""The kinds of items of a session between the gateway and an outpost, and pieces of memory as items.

An item is its kind and its parts. Each direction keeps one order, so a piece of memory that is put before a message is
there when the message is. An outpost runs a worker in each of its places, which are numbered from 0. Items are of the
worker in place 0 until a :data:`PLACE` names another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgpack

from cs_proto.codec import pack
from cs_proto.descriptors import Location
from cs_proto.errors import PeerProtocolError
from cs_proto.records import Buffer

from .memory import PIECE_NBYTES, Piece

__all__ = [
    "COLLEAGUE",
    "CONTROLLER",
    "JOIN",
    "LAUNCHER",
    "MEMORY",
    "PLACE",
    "SERVER",
    "SUPERVISOR",
    "Places",
    "parts_of",
    "piece_of",
]

#: A Join of the outpost; a Joined or a StartFailed as its answer.
JOIN = b"J"
#: A packet between the supervisor and the launcher of a worker; an empty one: the supervisor has hung up.
LAUNCHER = b"L"
#: A packet between the supervisor and the worker.
SUPERVISOR = b"S"
#: A message between the server and the worker.
SERVER = b"Z"
#: A message between the worker and a peer that connects to it, behind the label of that peer.
CONTROLLER = b"C"
#: A message between the worker and another one to which it connects, behind the label of that one.
COLLEAGUE = b"W"
#: A piece of memory.
MEMORY = b"M"
#: The number of a place, two bytes: the items behind it, in this direction, are of the worker there.
PLACE = b"P"

_PLACE_NBYTES = 2


class Places:
    """Which worker of an outpost each item is of, in both directions of one session, at one of its ends."""

    def __init__(self, count: int, put: Callable[[bytes, Sequence[Buffer]], None]) -> None:
        """The outpost has ``count`` places. ``put`` puts an item."""
        self._count, self._put = count, put
        self._told = self._heard = 0

    def put(self, place: int, kind: bytes, parts: Sequence[Buffer]) -> None:
        """Put an item of the worker in this place."""
        if place != self._told:
            self._told = place
            self._put(PLACE, [place.to_bytes(_PLACE_NBYTES)])
        self._put(kind, parts)

    def of(self, kind: bytes, parts: Sequence[Buffer]) -> int | None:
        """The place of the worker of an item that was received; None for an item that names the next one.

        Raises PeerProtocolError for a place that the outpost does not have.
        """
        if kind != PLACE:
            return self._heard
        place = int.from_bytes(bytes(parts[0])) if len(parts) == 1 and len(parts[0]) == _PLACE_NBYTES else -1
        if not 0 <= place < self._count:
            raise PeerProtocolError(f"an item names no place of an outpost that has {self._count}")
        self._heard = place
        return None


def parts_of(piece: Piece) -> list[Buffer]:
    """The parts of the item that brings ``piece``."""
    return [pack((piece.segment, piece.reservation, piece.offset)), piece.data]


def piece_of(parts: Sequence[Buffer]) -> Piece:
    """The piece of memory in an item. Raises PeerProtocolError if there is none."""
    try:
        place, data = parts
        segment, reservation, offset = msgpack.unpackb(place)
        Location(segment, offset)
        end = offset + memoryview(data).nbytes
        is_whole = type(reservation) is int and end <= reservation < 1 << 62
    except Exception as error:  # the library raises what it likes for bytes that a peer has made
        raise PeerProtocolError(f"an item is no piece of memory: {error}") from error
    if not is_whole or memoryview(data).nbytes > PIECE_NBYTES:
        raise PeerProtocolError(f"{memoryview(data).nbytes} bytes at {offset} are no piece of segment {segment}")
    return Piece(segment, reservation, offset, data)
