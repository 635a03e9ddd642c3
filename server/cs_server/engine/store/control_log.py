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
from contextlib import suppress
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cs_proto.errors import CentralStorageError, MemoryPlanError
from cs_proto.memory_plan import LOG_GROWTH, LOG_NBYTES

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
_MAGIC = int.from_bytes(b"cs-ctl-2", "little")
_IS, _NBYTES, _ACTIVE, _TAIL = 0, 1, 2, 3  # _TAIL + half: where that half ends
_HEADER_NBYTES = 64

# What one write appends: crc32 of the rest, bytes of the rest; entries; room up to a multiple of 8 bytes.
_HEAD = struct.Struct("<QQ")
# An entry: length of key, length of value; key; value.
_ENTRY = struct.Struct("<IQ")
_REMOVED = (1 << 64) - 1


class ControlLog:
    """A store in a writable buffer: an append-only log in one of its halves.

    A ``write`` appends its entries and then publishes them by one store of the half's end; what was appended but not
    published does not count. When the half is full, or most of it is out of date, the live entries are copied to the
    other half, which then becomes the one that counts by one store as well.
    """

    def __init__(
        self,
        buffer: NDArray[np.uint8],
        turnover: int = LOG_NBYTES,
        reserve: Callable[[int, int], None] | None = None,
        discard: Callable[[int, int], None] | None = None,
    ) -> None:
        """Open the store in ``buffer`` (1-D uint8, begins at a multiple of 8), or make one where it is all zeros.

        ``reserve(start, stop)`` is called before these bytes are written, and raises MemoryPlanError where the
        memory behind them has no room for them; the first 64 are never asked for. ``discard(start, stop)`` gives the
        memory behind bytes back that count no more.

        A half is rewritten when it exceeds ``turnover`` bytes and four times what is live: that bounds how much memory
        a large buffer takes. Raises :class:`ControlDamaged` where the buffer holds something else.
        """
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise ControlDamaged("a control log needs a writable, contiguous 1-D buffer of uint8")
        if buffer.ctypes.data % 8 or buffer.nbytes < _HEADER_NBYTES + 16:
            raise ControlDamaged(f"a buffer of {buffer.nbytes} bytes at {buffer.ctypes.data:#x} cannot hold a store")
        self._turnover = turnover
        self._reserve = reserve
        self._discard = discard
        self._memory = buffer.data.cast("B")
        self._words = buffer[:_HEADER_NBYTES].view(np.uint64)
        self._half_nbytes = (buffer.nbytes - _HEADER_NBYTES) // 2 // 8 * 8
        # Where the live entry of each key lies: (first byte in the buffer, bytes).
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
        for key, (start, nbytes) in list(self._index.items()):
            yield key, bytes(self._memory[start + _ENTRY.size + len(key) : start + nbytes])

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        index, live = self._index, self._live_nbytes
        first = at = self._base(self._active) + self._tail + _HEAD.size
        parts: list[bytes] = []
        places: list[tuple[bytes, int, int]] = []  # of what stays, and 0 bytes for what goes
        for key, value in changes.items():
            known = index.get(key)
            if known is not None:
                live -= known[1]
            key_nbytes = len(key)
            if value is None:
                parts += (_ENTRY.pack(key_nbytes, _REMOVED), key)
                places.append((key, at, 0))
                at += _ENTRY.size + key_nbytes
            else:
                value_nbytes = len(value)
                parts += (_ENTRY.pack(key_nbytes, value_nbytes), key, value)
                nbytes = _ENTRY.size + key_nbytes + value_nbytes
                places.append((key, at, nbytes))
                live += nbytes
                at += nbytes
        appended = _round_up(_HEAD.size + at - first)
        if self._tail + appended <= min(self._half_nbytes, max(self._turnover, LOG_GROWTH * live)):
            start = first - _HEAD.size
            self._make_room(start, appended)
            body = b"".join(parts)
            self._store(start, _HEAD.pack(zlib.crc32(body), len(body)))
            self._store(first, body)
            for key, at, nbytes in places:
                if nbytes:
                    index[key] = (at, nbytes)
                else:
                    index.pop(key, None)
            self._tail += appended
            self._publish(_TAIL + self._active, self._tail)
        elif _round_up(_HEAD.size + live) <= self._half_nbytes:
            self._make_room(self._base(1 - self._active), _round_up(_HEAD.size + live))
            self._rewrite(changes, live)
        else:
            raise ControlFull(
                f"the control store is full: {live} bytes are needed, {self._half_nbytes} available; "
                "pass smaller values to merge points and return smaller results, or raise the limit of addresses "
                "(ulimit -v) where there is one"
            )
        self._live_nbytes = live

    def _make_room(self, start: int, nbytes: int) -> None:
        if self._reserve is not None:
            try:
                self._reserve(start, start + nbytes)
            except MemoryPlanError as error:
                raise ControlFull(str(error)) from error

    def _rewrite(self, changes: Mapping[bytes, bytes | None], live: int) -> None:
        """Put what is live after ``changes`` are set, ``live`` bytes, into the other half and let that one count."""
        other = 1 - self._active
        base = self._base(other)
        start, crc = base + _HEAD.size, 0
        index: dict[bytes, tuple[int, int]] = {}
        entries: Iterator[tuple[bytes, bytes | memoryview]] = chain(
            ((k, self._memory[at : at + n]) for k, (at, n) in self._index.items() if k not in changes),
            ((k, _ENTRY.pack(len(k), len(v)) + k + v) for k, v in changes.items() if v is not None),
        )
        for key, entry in entries:
            self._store(start, entry)
            crc = zlib.crc32(entry, crc)
            index[key] = (start, len(entry))
            start += len(entry)
        self._store(base, _HEAD.pack(crc, live))
        tail = _round_up(_HEAD.size + live)
        self._publish(_TAIL + other, tail)
        self._publish(_ACTIVE, other)
        if self._discard is not None:
            start = self._base(self._active)
            with suppress(OSError):  # a file system without holes keeps the memory
                self._discard(start, start + self._tail)
        self._active, self._tail, self._index = other, tail, index

    def _replay(self) -> None:
        start, end = self._base(self._active), self._base(self._active) + self._tail
        while start < end:
            crc, nbytes = _HEAD.unpack_from(self._memory, start) if end - start >= _HEAD.size else (0, end)
            stop = start + _HEAD.size + nbytes
            if stop > end or zlib.crc32(self._memory[start + _HEAD.size : stop]) != crc:
                raise ControlDamaged(f"what was written at byte {start} of the control store does not read back")
            at = start + _HEAD.size
            while at < stop:
                at = self._replay_entry(at)
            start += _round_up(_HEAD.size + nbytes)

    def _replay_entry(self, start: int) -> int:
        """Take in the entry that begins at ``start``; where it ends."""
        key_nbytes, value_nbytes = _ENTRY.unpack_from(self._memory, start)
        stop = start + _ENTRY.size + key_nbytes
        key = bytes(self._memory[start + _ENTRY.size : stop])
        self._live_nbytes -= self._index.get(key, (0, 0))[1]
        if value_nbytes == _REMOVED:
            self._index.pop(key, None)
        else:
            stop += value_nbytes
            self._index[key] = (start, stop - start)
            self._live_nbytes += stop - start
        return int(stop)

    def _base(self, half: int) -> int:
        return _HEADER_NBYTES + half * self._half_nbytes

    # The only two that write. Tests listen here and cut the stream of stores at every byte.

    def _store(self, start: int, data: bytes | memoryview) -> None:
        self._memory[start : start + len(data)] = data

    def _publish(self, word: int, value: int) -> None:
        self._words[word] = value


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
