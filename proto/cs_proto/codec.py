"""Records to message parts and back, with explicit limits.

A message is one msgpack header, then its frames in the order of the record's fields. Anything else that a peer sends
raises :class:`PeerProtocolError` here, and no other error: this is the only place that puts the blame on the peer.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack

from .descriptors import Array
from .errors import LocalProtocolError, PeerProtocolError
from .frozen import fields_of, frozen
from .messages import ApplyPoint, Got, Return, Run, RunFinished, Value  # the module fills the table of records
from .records import Buffer, Frame, Frames, Record, altered, from_wire, shown

__all__ = [
    "ANSWER_NBYTES",
    "BULK_LIMITS",
    "LIMITS",
    "MARK_NBYTES",
    "PACKET_NBYTES",
    "WORK_LIMITS",
    "Decoder",
    "Limits",
    "RunEncoder",
    "answered",
    "decode",
    "decode_finished",
    "encode",
    "encode_values",
    "pack",
]


@frozen
class Limits:
    """The limits of what a receiver accepts, in bytes.

    ``items`` bounds the length of every list in a header, and the number of lists and maps in it.
    """

    header_nbytes: int = 4 << 20
    frames: int = 4096
    frame_nbytes: int = 64 << 20
    items: int = 1 << 17
    text_nbytes: int = 1 << 20
    message_nbytes: int = 128 << 20

    @property
    def part_nbytes(self) -> int:
        """Bytes of the largest part that a socket accepts. A larger part ends the connection; for a smaller one that
        breaks a limit, :func:`decode` says what is wrong."""
        return max(self.header_nbytes, 2 * self.frame_nbytes)


#: The most bytes of variables that a server sends in one answer.
ANSWER_NBYTES = 1 << 30

#: What a server and a supervisor accept. A replica sends at most 1000 arrays of 64 KiB in frames, and a process that
#: maps no memory sends 16 MiB at a time.
LIMITS = Limits()
#: What a worker accepts from a controller and from other workers: functions, and arguments in long lists. Whatever is
#: larger than 64 KiB lies in an arena.
WORK_LIMITS = Limits(items=1 << 27)
#: What clients and workers accept from their server: whole variables may come in a frame, and one message holds what
#: every replica returned, each of which was within :data:`LIMITS`.
BULK_LIMITS = Limits(
    header_nbytes=(1 << 32) - 1, frames=1 << 22, frame_nbytes=ANSWER_NBYTES, items=1 << 27, message_nbytes=1 << 40
)

#: Largest packet on the supervisor's socket.
PACKET_NBYTES = 128 * 1024

#: The most bytes of a mark, which a writer of a mailbox leaves beside the messages.
MARK_NBYTES = 1024

# One packer for all threads, because making one costs more than most headers. It calls no Python code while it packs,
# so
# no other thread can interrupt it. It keeps the buffer of the largest header, so the size of that is limited.
_packer = msgpack.Packer()
_KEPT_NBYTES = 1 << 20

# One byte of a header can become an empty list of 64 bytes, so small headers are too cheap to need counting.
_COUNTED_NBYTES = 64 * 1024


def pack(value: object) -> bytes:
    """Pack a value made of None, numbers, text, bytes, lists, tuples and dicts with msgpack."""
    packed: bytes = _packer.pack(value)
    if len(packed) > _KEPT_NBYTES:
        _make_packer()
    return packed


def _make_packer() -> None:
    global _packer
    _packer = msgpack.Packer()


def encode(record: Record, limits: Limits = LIMITS) -> list[Buffer]:
    """The parts of the message: header first. Frames are passed on, not copied.

    Raises :class:`LocalProtocolError` if a receiver with ``limits`` would refuse its size, or if it has text that is
    not Unicode.
    """
    frames: list[Buffer] = []
    if not isinstance(record, Record):
        raise LocalProtocolError(f"{shown(record)} is not a record")
    return _parts(type(record), record.to_wire, (frames,), limits)


def encode_values(kind: type[Record], values: Sequence[Any]) -> list[Buffer]:
    """The same as ``encode(kind(*values))`` without building the record, so its fields are not checked.

    For senders that send such a record in every step and know that its values are valid.
    """
    return _parts(kind, kind.wire_of, ([], *values), LIMITS)


class RunEncoder:
    """Encodes the Runs of one step after the other as :func:`encode_values` does.

    From step to step a Run often differs only in its two numbers and its arguments. The other fields are compared with
    those of the Run before, and not encoded again.
    """

    def __init__(self) -> None:
        # By replica: the fields before the arguments, without the numbers, those behind the buffers, and both encoded.
        self._known: list[tuple[tuple[Any, ...], tuple[Any, ...], bytes, bytes]] = []

    def encode(self, runs: Sequence[tuple[Any, ...]]) -> list[list[Buffer]]:
        """The parts of each message. ``runs`` are the values of the fields of the Run of each replica, which have the
        same two numbers. Raises LocalProtocolError as :func:`encode` does."""
        beginning = _RUN + _packer.pack((Run.code, *runs[0][:2]))[1:]
        self._known = self._known or [_NO_RUN] * len(runs)
        encoded: list[list[Buffer]] = []
        for replica, (values, known) in enumerate(zip(runs, self._known, strict=True)):
            before, arguments, behind = values[2:_ARGUMENTS], values[_ARGUMENTS], values[_ARGUMENTS + 1 :]
            if known[0] != before or known[1] != behind:
                encoded.append(self._anew(replica, values))
            elif type(arguments) is bytes and len(arguments) <= _KNOWN_NBYTES:
                encoded.append([beginning + known[2] + _packer.pack(arguments) + known[3]])
            elif type(arguments) is Frame and memoryview(arguments.data).nbytes <= LIMITS.frame_nbytes:
                encoded.append([beginning + known[2] + _FIRST_FRAME + known[3], arguments.data])
            else:
                encoded.append(self._anew(replica, values))
        return encoded

    def _anew(self, replica: int, values: tuple[Any, ...]) -> list[Buffer]:
        encoded = encode_values(Run, values)  # first, because it raises
        _, _, _, _, _, function, _, _, buffers, _, _, held, _, changes, _ = values
        if not (function or buffers or held or changes):
            wire: Any = Run.wire_of([], *values)
            first, last = (b"".join(map(pack, part)) for part in (wire[3 : _ARGUMENTS + 1], wire[_ARGUMENTS + 2 :]))
            self._known[replica] = values[2:_ARGUMENTS], values[_ARGUMENTS + 1 :], first, last
        return encoded


def _parts(
    kind: type[Record], wire_of: Callable[..., object], arguments: tuple[Any, ...], limits: Limits
) -> list[Buffer]:
    """The parts of the message. ``wire_of`` returns the value of the header for ``arguments``. The first of these is
    the list of frames, which it fills. Raises LocalProtocolError as :func:`encode` does."""
    try:
        header: bytes = _packer.pack(wire_of(*arguments))  # as pack() does
    except UnicodeEncodeError as error:
        raise LocalProtocolError(
            f"a {kind.__name__} cannot be sent: it has text that is not Unicode: {error}"
        ) from error
    except TypeError as error:
        raise LocalProtocolError(f"a {kind.__name__} cannot be sent: {error}") from error
    if len(header) > _KEPT_NBYTES:
        _make_packer()
    if len(header) > limits.header_nbytes:
        at_most = limits.header_nbytes
        raise LocalProtocolError(f"a {kind.__name__} with a header of {len(header)} bytes; at most {at_most}")
    frames: list[Buffer] = arguments[0]
    if frames and (fault := _fault(len(header), frames, limits)):
        raise LocalProtocolError(
            f"a {kind.__name__} cannot be sent: {fault}; send less at a time, or use shared memory"
        )
    return [header, *frames]


def _fault(header_nbytes: int, frames: Sequence[Buffer], limits: Limits) -> str:
    """The fault in the number or sizes of the frames; empty if there is none."""
    if len(frames) > limits.frames:
        return f"{len(frames)} frames; at most {limits.frames}"
    nbytes = header_nbytes
    for number, frame in enumerate(frames):
        frame_nbytes = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        if frame_nbytes > limits.frame_nbytes:
            return f"frame {number} has {frame_nbytes} bytes; at most {limits.frame_nbytes}"
        nbytes += frame_nbytes
    return f"a message of {nbytes} bytes; at most {limits.message_nbytes}" if nbytes > limits.message_nbytes else ""


def decode(parts: Sequence[Buffer], limits: Limits = LIMITS) -> Record:
    """The record in ``parts``. Raises :class:`PeerProtocolError` if they are not one record within ``limits``."""
    if not parts:
        raise PeerProtocolError("the message is empty")
    header, *frames = parts
    header_nbytes = len(header) if type(header) is bytes else memoryview(header).nbytes
    if header_nbytes > limits.header_nbytes:
        raise PeerProtocolError(f"a header of {header_nbytes} bytes; at most {limits.header_nbytes}")
    if frames and (fault := _fault(header_nbytes, frames, limits)):
        raise PeerProtocolError(fault)
    count = _count(limits.items) if header_nbytes > _COUNTED_NBYTES else None
    try:
        wire = msgpack.unpackb(
            header,
            strict_map_key=True,
            max_str_len=limits.text_nbytes,
            max_bin_len=limits.header_nbytes,
            max_array_len=min(limits.items, header_nbytes),  # msgpack allocates as much as the header claims
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
        raise PeerProtocolError(f"a header that is not one msgpack value: {error!r:.200}") from error
    if held.taken != len(frames):
        raise PeerProtocolError(f"the message has {len(frames)} frames, but its header names {held.taken}")
    return record


def decode_finished(parts: Sequence[Buffer], limits: Limits = LIMITS) -> Record:
    """As :func:`decode`, and quick if the record is a RunFinished with short results, as it is after most steps."""
    header = parts[0] if len(parts) == 1 else b""
    if type(header) is not bytes or header[:3] != _FINISHED:
        return decode(parts, limits)
    try:
        at = 4 + _NUMBER_NBYTES[header[3]]
        number = header[3] if at == 4 else int.from_bytes(header[4:at], "big")
        values: tuple[Value, ...] = ()
        count, at = header[at] - _ARRAY, at + 1
        for _ in range(count):
            begin = at + 4
            end = begin + header[begin - 1]
            if header[at : begin - 1] != _SHORT_VALUE or header[end] != _ARRAY:
                return decode(parts, limits)
            body, at = header[begin:end], end + 1
            values += (_nothing() if body == _NOTHING else Value(body, ()),)
        commits, is_whole = header[at + 1], header[at] == _NIL and not header[at + 2 :]
    except (IndexError, KeyError):  # bytes lack, or the number is none of a run
        return decode(parts, limits)
    if not is_whole or commits > _LARGEST_BYTE or not 0 <= count <= _MOST_ELEMENTS:
        return decode(parts, limits)
    made = object.__new__(RunFinished)
    made.__dict__.update(run=(number,), values=values, error=None, commits=commits)
    return made


@functools.cache
def _nothing() -> Value:
    """The Value of None, which most steps return."""
    return Value(_NOTHING, ())


# These hold the beginning of a header: how many fields there are, the code, and a number.
_BEGINNING_NBYTES = 32


def answered(header: memoryview) -> int | None:
    """The number of the Get that a Got with this header answers; None for the header of another record. The variables
    in it are not decoded. For headers that a server has made."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(header[:_BEGINNING_NBYTES])
    unpacker.read_array_header()
    number: int | None = unpacker.unpack() if unpacker.unpack() == Got.code else None
    return number


# The beginning of a message of a client's run, up to the number of the run. The second table gives, for the first byte
# of that number, how many more bytes it has: too many for any header if it is too large for a run. In a Run the step
# follows.
_BEGINNINGS = {
    msgpack.Packer().pack_array_header(1 + len(fields_of(kind))) + bytes([kind.code, 0x91]): kind
    for kind in (Return, Run)
}
_RUN = msgpack.Packer().pack_array_header(1 + len(fields_of(Run)))
# In place of a Run that is known.
_NO_RUN: tuple[tuple[Any, ...], tuple[Any, ...], bytes, bytes] = (), (), b"", b""
# Where the arguments are among the fields of a Run, and these arguments where they are the first frame.
_ARGUMENTS, _FIRST_FRAME = fields_of(Run).index("arguments"), pack({"frame": 0})
# The first byte of an array of more than 15 elements; two bytes with their number follow.
_LONG_ARRAY = 0xDC
_NUMBER_NBYTES = [*(0,) * 128, *(1 << 40,) * 128]  # no header is that long
_NUMBER_NBYTES[0xCC:0xCF] = 1, 2, 4
# The msgpack prefixes of up to 255 bytes and of up to 65535.
_BYTES, _MORE_BYTES = 0xC4, 0xC5
# The bytes of None, and of an array, to which the number of its elements is added if it is small. The largest number
# that is its own byte.
_NIL, _ARRAY, _MOST_ELEMENTS, _LARGEST_BYTE = 0xC0, 0x90, 15, 0x7F
_NOTHING = bytes([_NIL])
# How a RunFinished begins, and a Value of up to 255 bytes.
_FINISHED = bytes([_ARRAY + 1 + len(fields_of(RunFinished)), RunFinished.code, _ARRAY + 1])
_SHORT_VALUE = bytes([_ARRAY + 1 + len(fields_of(Value)), Value.code, _BYTES])
# This many messages of either kind are cached, if their headers are small.
_KNOWN, _KNOWN_NBYTES = 32, 16 * 1024


class _Cached(NamedTuple):
    """A message that is cached: the bytes between the numbers and the changing bytes, and how many they are; the same
    of the bytes after the changing ones, None if those are not part of the header; the record, and whether it has
    arrays."""

    between: bytes
    between_nbytes: int
    behind: bytes | None
    behind_nbytes: int
    record: Return | Run
    has_arrays: bool


class Decoder:
    """Decodes messages like :func:`decode`, and caches those of a step.

    The message of a step differs from the message of an earlier step only in the number of the run, in the pickled
    arguments or the result, and, in a Run, in the step and in the bytes of its frames. So the decoder compares all
    other bytes with the cached message and does not decode them again. Arguments and sparse gradients of the same sizes
    lie at the same places again when their part of the arena is used again; if the sizes differ from step to step, few
    messages are cached.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        #: By the beginning of the message, the latest first.
        self._known: dict[bytes, list[_Cached]] = {each: [] for each in _BEGINNINGS}
        # How many messages with arrays came since one was the same as a cached message.
        self._vain = 0

    def decode(self, parts: Sequence[Buffer]) -> Record:
        """The record in ``parts``. Raises :class:`PeerProtocolError` as :func:`decode`."""
        header = parts[0] if parts else b""
        if type(header) is not bytes or not header:
            return decode(parts, self._limits)
        begin, size = 5 if header[0] == _LONG_ARRAY else 3, len(header)
        if (beginning := header[:begin]) not in self._known or size == begin:
            return decode(parts, self._limits)
        start = begin + 1 + _NUMBER_NBYTES[header[begin]]
        number = header[begin] if start == begin + 1 else int.from_bytes(header[begin + 1 : start], "big")
        step = 0
        if header[begin - 2] == Run.code and start < size:
            first = start + 1
            start = first + _NUMBER_NBYTES[header[start]]
            step = header[first - 1] if start == first else int.from_bytes(header[first:start], "big")
        entries = self._known[beginning]
        for between, between_nbytes, behind, behind_nbytes, known, has_arrays in entries:
            at = start + between_nbytes
            if header[start:at] == between and number >= known.series:
                last = size - behind_nbytes
                if behind is None:
                    if at == size and len(parts) == 2 and _has_room(parts[1], self._limits):
                        self._vain = 0 if has_arrays else self._vain
                        return altered(known, run=(number,), step=step, arguments=Frame(parts[1]))
                elif at < last and header[last:] == behind:
                    first = at + (2 if header[at] == _BYTES else 3)
                    length = int.from_bytes(header[at + 1 : first], "big")
                    if header[at] in (_BYTES, _MORE_BYTES) and first + length == last:
                        is_alone = len(parts) == 1
                        if type(known) is Return and is_alone:
                            self._vain = 0 if has_arrays else self._vain
                            return altered(known, run=(number,), value=Value(header[first:last], ()))
                        if type(known) is Run:
                            buffers = () if is_alone and not has_arrays else _buffers(known, parts, self._limits)
                            if buffers is not None:
                                self._vain = 0 if has_arrays else self._vain
                                arguments = header[first:last]
                                return altered(known, run=(number,), step=step, arguments=arguments, buffers=buffers)
        record = decode(parts, self._limits)
        rest = _rest(record) if len(header) <= _KNOWN_NBYTES and self._may_repeat(record) else None
        if rest is not None:
            between, body, behind, known = rest
            if header[start:] == between + body + (behind or b""):  # only our own encoding
                made = _Cached(between, len(between), behind, len(behind or b""), known, _has_arrays(known))
                self._known[beginning] = [made, *entries[: _KNOWN - 1]]
        return record

    def _may_repeat(self, record: Record) -> bool:
        """Whether a message like this one is worth being cached."""
        if not _has_arrays(record):
            return True
        self._vain += 1
        return self._vain <= _KNOWN or self._vain % _KNOWN == 0


def _has_arrays(record: Record) -> bool:
    """Whether it says where arrays lie, which may be different in every step."""
    if type(record) is Run:
        return bool(record.buffers)
    notes = record.notes if type(record) is Return else ()
    return any(type(note) is ApplyPoint and any(update.sparse for update in note.updates) for note in notes)


def _buffers(known: Run, parts: Sequence[Buffer], limits: Limits) -> tuple[Array, ...] | None:
    """The buffers of a Run like a cached one, whose frames are these parts; None if the frames do not fit."""
    frames = deque(parts[1:])
    made = []
    for array in known.buffers:
        if type(array.place) is Frame:
            if not frames or (frame := Frame(frames.popleft())).nbytes != array.nbytes:
                return None
            array = altered(array, place=frame)
        made.append(array)
    return None if frames or _fault(len(parts[0]), parts[1:], limits) else tuple(made)


def _has_room(frame: Buffer, limits: Limits) -> bool:
    return (len(frame) if type(frame) is bytes else memoryview(frame).nbytes) <= limits.frame_nbytes


def _rest(record: Record) -> tuple[bytes, bytes, bytes | None, Return | Run] | None:
    """The encoding of a message after the number of its run: the bytes before the changing ones, the changing ones, the
    bytes after them; and the record without them. None if more of the message changes from step to step."""
    if type(record) is Return and record.value is not None and not record.value.arrays and not record.changes:
        if any(type(note) is not ApplyPoint for note in record.notes):
            return None
        frames: list[Buffer] = []
        wire: Any = record.to_wire(frames)
        if frames:
            return None
        _, _, *before, (code, body, arrays), error, series, lookahead, client, changes, name, offset = wire
        between = b"".join(map(pack, before)) + b"\x93" + pack(code)
        behind = b"".join(map(pack, (arrays, error, series, lookahead, client, changes, name, offset)))
        return between, pack(body), behind, altered(record, value=None)
    if type(record) is Run and not (record.function or record.held or record.changes):
        wire = record.to_wire([])
        _, _, _, *before, arguments, buffers, series, lookahead, held, name, changes, check = wire
        between = b"".join(map(pack, before))
        behind = b"".join(map(pack, (buffers, series, lookahead, held, name, changes, check)))
        known = altered(record, arguments=b"", buffers=tuple(map(_without_bytes, record.buffers)))
        if type(record.arguments) is bytes:
            return between, pack(arguments), behind, known
        if type(record.arguments) is Frame and not any(type(array.place) is Frame for array in record.buffers):
            return between + pack(arguments) + behind, b"", None, known
    return None


def _without_bytes(array: Array) -> Array:
    return altered(array, place=Frame(b"")) if type(array.place) is Frame else array


def _count(limit: int) -> Callable[[object], object]:
    """A hook that counts the lists and maps of a header and raises if there are too many."""
    passed = itertools.count(1)

    def hook(value: object) -> object:
        if next(passed) > limit:
            raise LocalProtocolError(f"more than {limit} lists in a header")
        return value

    return hook
