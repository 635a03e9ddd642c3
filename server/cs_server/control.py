"""The store behind the engine: keys to bytes, in which all changes of one event become visible together.

Owns how entries lie in memory and the moment at which they count. It knows nothing of what they mean; ``tables``
writes through it. :class:`ControlMemory` is a dictionary, for tests and for services that nobody restarts.
:class:`ControlLog` lies in the control segment, whose bytes outlive the server: a process killed between any two of
its stores leaves either the state before the last ``write`` or the state after it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cs_proto.errors import CentralStorageError, MemoryPlanError

__all__ = ["Control", "ControlDamaged", "ControlFull", "ControlLog", "ControlMemory"]


class ControlFull(MemoryPlanError):
    """The changes do not fit the store. It stands as it was before."""


class ControlDamaged(CentralStorageError, RuntimeError):
    """The memory handed over is not a store, or its published part does not read back."""


class Control(Protocol):
    """What the engine needs of a store."""

    def items(self) -> Iterable[tuple[bytes, bytes]]:
        """Every key with its value, in no order."""

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Set keys, or remove those whose value is None: all of them or, with :class:`ControlFull`, none."""


class ControlMemory:
    """A store in a dictionary. Nothing of it outlives the process."""

    def __init__(self) -> None:
        self._entries: dict[bytes, bytes] = {}

    def items(self) -> Iterable[tuple[bytes, bytes]]:
        return list(self._entries.items())

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        for key, value in changes.items():
            if value is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = value


# Four words head the memory: what it is, its size, and where each half ends with the half that counts. They are
# written with single aligned stores, in an order in which every prefix of the stores is a valid store.
_MAGIC = int.from_bytes(b"cs-ctl-1", "little")
_IS, _NBYTES, _ACTIVE, _TAIL = 0, 1, 2, 3  # _TAIL + half: where that half ends
_HEADER_NBYTES = 64

# A record: crc32 of the rest, length of key, length of value; key; value; padding to 8 bytes.
_RECORD = struct.Struct("<IIQ")
_LENGTHS = struct.Struct("<IQ")
_REMOVED = (1 << 64) - 1
_CRC = struct.Struct("<I")
_SMALL_NBYTES = 4096  # what costs less to copy once more than two calls
_PADDING = tuple(bytes(-nbytes % 8) for nbytes in range(8))


class ControlLog:
    """A store in a writable buffer: an append-only log in one of its halves.

    A ``write`` appends its records and then publishes them by one store of the half's end; what was appended but not
    published does not count. When the half is full, or most of it is out of date, the live records are copied to the
    other half, which then becomes the one that counts by one store as well.
    """

    def __init__(
        self,
        buffer: NDArray[np.uint8],
        turnover: int = 4 << 20,
        reserve: Callable[[int, int], None] | None = None,
    ) -> None:
        """Open the store in ``buffer`` (1-D uint8, begins at a multiple of 8), or make one where it is all zeros.

        ``reserve(start, stop)`` is called before these bytes are written, and raises MemoryPlanError where the
        memory behind them has no room for them; the first 64 are never asked for.

        A half is rewritten when it exceeds ``turnover`` bytes and four times what is live: that bounds how much of a
        large buffer is ever touched. Raises :class:`ControlDamaged` where the buffer holds something else.
        """
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise ControlDamaged("a control log needs a writable, contiguous 1-D buffer of uint8")
        if buffer.ctypes.data % 8 or buffer.nbytes < _HEADER_NBYTES + 16:
            raise ControlDamaged(f"a buffer of {buffer.nbytes} bytes at {buffer.ctypes.data:#x} cannot hold a store")
        self._turnover = turnover
        self._reserve = reserve
        self._memory = buffer.data.cast("B")
        self._words = buffer[:_HEADER_NBYTES].view(np.uint64)
        self._half_nbytes = (buffer.nbytes - _HEADER_NBYTES) // 2 // 8 * 8
        # Where the live record of each key lies: (first byte in the buffer, bytes).
        self._index: dict[bytes, tuple[int, int]] = {}
        self._live_nbytes = 0
        if self._words[_IS] == 0:
            self._publish(_NBYTES, buffer.nbytes)
            self._publish(_IS, _MAGIC)
        elif self._words[_IS] != _MAGIC or self._words[_NBYTES] != buffer.nbytes:
            raise ControlDamaged(
                f"this is not a control store of {buffer.nbytes} bytes: its head says "
                f"{int(self._words[_IS]):#x}, {int(self._words[_NBYTES])}"
            )
        self._active = int(self._words[_ACTIVE])
        if self._active > 1 or self._words[_TAIL + self._active] > self._half_nbytes:
            raise ControlDamaged(f"half {self._active} ends at byte {int(self._words[_TAIL + self._active % 2])}")
        self._tail = int(self._words[_TAIL + self._active])
        self._replay()

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        for key, (start, _nbytes) in list(self._index.items()):
            _, key_nbytes, value_nbytes = _RECORD.unpack_from(self._memory, start)
            first = start + _RECORD.size + key_nbytes
            yield key, bytes(self._memory[first : first + value_nbytes])

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        records, index = [], self._index
        appended, live = 0, self._live_nbytes
        for key, value in changes.items():
            records.append(record := _record(key, value))
            appended += len(record)
            if key in index:
                live -= index[key][1]
            if value is not None:
                live += len(record)
        if self._tail + appended <= min(self._half_nbytes, max(self._turnover, 4 * live)):
            start = self._base(self._active) + self._tail
            self._make_room(start, appended)
            self._store(start, b"".join(records))
            for (key, value), record in zip(changes.items(), records, strict=True):
                if value is None:
                    index.pop(key, None)
                else:
                    index[key] = (start, len(record))
                start += len(record)
            self._tail += appended
            self._publish(_TAIL + self._active, self._tail)
        elif live <= self._half_nbytes:
            self._make_room(self._base(1 - self._active), live)
            pairs = zip(changes.items(), records, strict=True)
            self._rewrite({key: None if value is None else record for (key, value), record in pairs})
        else:
            raise ControlFull(
                f"the control store is full: {live} bytes are needed, {self._half_nbytes} available; "
                "bring smaller values to merge points and return smaller results, or reserve a larger store"
            )
        self._live_nbytes = live

    def _make_room(self, start: int, nbytes: int) -> None:
        if self._reserve is not None:
            try:
                self._reserve(start, start + nbytes)
            except MemoryPlanError as error:
                raise ControlFull(str(error)) from error

    def _rewrite(self, records: Mapping[bytes, bytes | None]) -> None:
        """Put what is live after these ``records`` are set, or removed (None), into the other half and let that one
        count."""
        other = 1 - self._active
        start = base = self._base(other)
        index: dict[bytes, tuple[int, int]] = {}
        for key, (first, nbytes) in self._index.items():
            if key not in records:
                self._store(start, self._memory[first : first + nbytes])
                index[key] = (start, nbytes)
                start += nbytes
        for key, record in records.items():
            if record is not None:
                self._store(start, record)
                index[key] = (start, len(record))
                start += len(record)
        self._publish(_TAIL + other, start - base)
        self._publish(_ACTIVE, other)
        self._active, self._tail, self._index = other, start - base, index

    def _replay(self) -> None:
        start, end = self._base(self._active), self._base(self._active) + self._tail
        while start < end:
            head = self._memory[start : start + _RECORD.size]
            crc, key_nbytes, value_nbytes = _RECORD.unpack(head) if len(head) == _RECORD.size else (0, 0, end)
            removed = value_nbytes == _REMOVED
            stop = start + _RECORD.size + key_nbytes + (0 if removed else value_nbytes)
            if stop > end or zlib.crc32(self._memory[start + 4 : stop]) != crc:
                raise ControlDamaged(f"the record at byte {start} of the control store does not read back")
            key = bytes(self._memory[start + _RECORD.size : start + _RECORD.size + key_nbytes])
            nbytes = _round_up(stop - start)
            self._live_nbytes -= self._index.get(key, (0, 0))[1]
            self._live_nbytes += 0 if removed else nbytes
            self._note(key, None if removed else (start, nbytes))
            start += nbytes

    def _note(self, key: bytes, place: tuple[int, int] | None) -> None:
        if place is None:
            self._index.pop(key, None)
        else:
            self._index[key] = place

    def _base(self, half: int) -> int:
        return _HEADER_NBYTES + half * self._half_nbytes

    # The only two that write. Tests listen here and cut the stream of stores at every byte.

    def _store(self, start: int, data: bytes | memoryview) -> None:
        self._memory[start : start + len(data)] = data

    def _publish(self, word: int, value: int) -> None:
        self._words[word] = value


def _record(key: bytes, value: bytes | None) -> bytes:
    head = _LENGTHS.pack(len(key), _REMOVED if value is None else len(value)) + key
    if value is None or len(value) < _SMALL_NBYTES:
        body = head + value if value else head
        return _CRC.pack(zlib.crc32(body)) + body + _PADDING[(4 + len(body)) % 8]
    crc = zlib.crc32(value, zlib.crc32(head))
    return b"".join((_CRC.pack(crc), head, value, _PADDING[(4 + len(head) + len(value)) % 8]))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
