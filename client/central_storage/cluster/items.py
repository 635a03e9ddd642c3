"""The kinds of items of a session between the gateway and an outpost, and pieces of memory as items.

An item is its kind and its parts. Each direction keeps one order, so a piece of memory that is put before a message is
there when the message is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from cs_proto.codec import pack
from cs_proto.descriptors import Location
from cs_proto.errors import PeerProtocolError
from cs_proto.records import Buffer

from .memory import PIECE_NBYTES, Piece

__all__ = ["COLLEAGUE", "CONTROLLER", "JOIN", "LAUNCHER", "MEMORY", "SERVER", "SUPERVISOR", "parts_of", "piece_of"]

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
