"""Records to message parts and back, with explicit limits.

A message is one msgpack header and then its frames, in the order in which the record's fields hold them. Whatever a
peer sends that is not exactly that becomes one typed :class:`PeerProtocolError` and nothing else: this is the one
place where blame turns round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import msgpack

from .errors import LocalProtocolError, PeerProtocolError
from .messages import Return, Value  # the module fills the table of records
from .records import Buffer, Frames, Record, altered, from_wire, shown

__all__ = [
    "BULK_LIMITS",
    "LIMITS",
    "PACKET_NBYTES",
    "Decoder",
    "Limits",
    "decode",
    "encode",
    "encode_values",
    "pack",
]


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts. Sizes are bytes.

    ``items`` bounds the length of every list in a header, and the number of lists and maps in it.
    """

    header_nbytes: int = 4 << 20
    frames: int = 4096
    frame_nbytes: int = 64 << 20
    items: int = 1 << 17
    text_nbytes: int = 1 << 20


#: What a server and a supervisor accept.
LIMITS = Limits()
#: What clients and workers accept from their server and from each other: whole variables may come in a frame, and one
#: message holds what every replica returned, each of which was within :data:`LIMITS`.
BULK_LIMITS = Limits(header_nbytes=(1 << 32) - 1, frames=1 << 22, frame_nbytes=1 << 40, items=1 << 27)

#: Largest packet on the supervisor's socket.
PACKET_NBYTES = 128 * 1024

# One for all, since making one costs more than most headers: what it is given it writes without calling anybody, so no
# other thread comes in between. It keeps the room that the largest header took, so there is a limit to that.
_packer = msgpack.Packer()
_KEPT_NBYTES = 1 << 20

# One byte of a header can become an empty list of 64: what small headers can cost is not worth counting.
_COUNTED_NBYTES = 64 * 1024


def pack(value: object) -> bytes:
    """What consists of None, numbers, text, bytes, lists, tuples and dicts, in msgpack."""
    global _packer
    packed: bytes = _packer.pack(value)
    if len(packed) > _KEPT_NBYTES:
        _packer = msgpack.Packer()
    return packed


def encode(record: Record, limits: Limits = LIMITS) -> list[Buffer]:
    """The parts of the message: header first. Frames are passed on, not copied.

    Raises :class:`LocalProtocolError` where no receiver with ``limits`` accepts the header, or where it has text that
    is not Unicode.
    """
    frames: list[Buffer] = []
    if not isinstance(record, Record):
        raise LocalProtocolError(f"{shown(record)} is neither a record nor in one")
    try:
        header = pack(record.to_wire(frames))
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"a {type(record).__name__} with text that is not Unicode: {error}") from error
    except TypeError as error:
        raise LocalProtocolError(f"a {type(record).__name__} in which something cannot travel: {error}") from error
    if len(header) > limits.header_nbytes:
        _refuse_header(type(record), header, limits)
    return [header, *frames]


def encode_values(kind: type[Record], values: Sequence[Any], limits: Limits = LIMITS) -> list[Buffer]:
    """What :func:`encode` gives of ``kind(*values)``, for who sends one of a kind at every step and knows what the
    values are: nothing is built, and only its size is checked."""
    frames: list[Buffer] = []
    header = pack(kind.wire_of(frames, *values))
    if len(header) > limits.header_nbytes:
        _refuse_header(kind, header, limits)
    return [header, *frames]


def _refuse_header(kind: type[Record], header: bytes, limits: Limits) -> NoReturn:
    raise LocalProtocolError(f"a {kind.__name__} with a header of {len(header)} bytes; at most {limits.header_nbytes}")


def decode(parts: Sequence[Buffer], limits: Limits = LIMITS) -> Record:
    """The record in ``parts``. Raises :class:`PeerProtocolError` on anything that is not one within ``limits``."""
    if not parts:
        raise PeerProtocolError("an empty message")
    header, *frames = parts
    header_nbytes = len(header) if type(header) is bytes else memoryview(header).nbytes
    if header_nbytes > limits.header_nbytes:
        raise PeerProtocolError(f"a header of {header_nbytes} bytes; at most {limits.header_nbytes}")
    if len(frames) > limits.frames:
        raise PeerProtocolError(f"{len(frames)} frames; at most {limits.frames}")
    for number, frame in enumerate(frames):
        nbytes = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        if nbytes > limits.frame_nbytes:
            raise PeerProtocolError(f"frame {number} has {nbytes} bytes; at most {limits.frame_nbytes}")
    count = _count(limits.items) if header_nbytes > _COUNTED_NBYTES else None
    try:
        wire = msgpack.unpackb(
            header,
            strict_map_key=True,
            max_str_len=limits.text_nbytes,
            max_bin_len=limits.header_nbytes,
            max_array_len=min(limits.items, header_nbytes),  # msgpack makes room for what is promised
            max_map_len=1,
            max_ext_len=0,
            list_hook=count,
            object_hook=count,
        )
        held = Frames(frames)
        record = from_wire(wire, held)
    except LocalProtocolError as error:
        raise PeerProtocolError(str(error)) from error
    # msgpack raises ValueError, TypeError, StackError, UnicodeDecodeError, OverflowError and its own: all mean that
    # the peer's bytes are not a message.
    except Exception as error:
        raise PeerProtocolError(f"a header that is not one msgpack value: {type(error).__name__}: {error}") from error
    if held.taken != len(frames):
        raise PeerProtocolError(f"{len(frames)} frames, of which the header names {held.taken}")
    return record


# How a Return from a run of the client begins, up to the number of the run, and by the first byte of that how many more
# it has. What stands before the bytes of a value, of which there are up to 255.
_RETURN = bytes([0x90 + 1 + len(fields(Return)), Return.code, 0x91])
_NUMBER_NBYTES = dict.fromkeys(range(128), 0) | {0xCC + power: 1 << power for power in range(4)}
_VALUE, _SHORT_BYTES = bytes([0x93, Value.code]), 0xC4
# So many are known again.
_KNOWN = 32


class Decoder:
    """Decodes many messages, as :func:`decode` does each. What a replica returns from a small step is what it returned
    from one before, but for the number of the run and the bytes of the value: it is known again by what lies between
    these, which is not read once more."""

    def __init__(self) -> None:
        #: What lies between number and value, what comes behind that, and the record; the last one first.
        self._known: list[tuple[bytes, bytes, Return]] = []

    def decode(self, parts: Sequence[Buffer]) -> Record:
        """The record in ``parts``, within :data:`LIMITS`. Raises :class:`PeerProtocolError` as :func:`decode`."""
        header = parts[0] if len(parts) == 1 else b""
        at = len(_RETURN)
        if type(header) is not bytes or header[:at] != _RETURN or len(header) == at:
            return decode(parts)
        start = at + 1 + _NUMBER_NBYTES.get(header[at], len(header))
        number = header[at] if start == at + 1 else int.from_bytes(header[at + 1 : start], "big")
        for between, behind, known in self._known:
            if header.startswith(between, start) and header.endswith(behind):
                first, last = start + len(between) + 2, len(header) - len(behind)
                is_whole = 0 <= last - first < 256 and header[first - 2 : first] == bytes((_SHORT_BYTES, last - first))
                if is_whole and number >= known.series:
                    return altered(known, run=(number,), value=Value(header[first:last], ()))
        record = decode(parts)
        if type(record) is Return and record.value is not None:
            wire: Any = record.to_wire([])
            _, _, *before, value, error, series, lookahead, client = wire
            between = b"".join(map(pack, before)) + _VALUE
            behind = b"".join(map(pack, (value[2], error, series, lookahead, client)))
            if not value[2] and header == header[:start] + between + pack(value[1]) + behind:  # nobody else's spelling
                self._known = [(between, behind, record), *self._known[: _KNOWN - 1]]
        return record


def _count(limit: int) -> Callable[[object], object]:
    """A hook that lets every list and map of a header pass until there were too many."""
    passed = itertools.count(1)

    def hook(value: object) -> object:
        if next(passed) > limit:
            raise LocalProtocolError(f"more than {limit} lists in a header")
        return value

    return hook
