"""How a checkpoint's file is read: it is opened once, and every byte is checked before it is used.

``file_format`` says what a valid header is.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from central_storage.diagnostics.bars import automatic
from cs_proto.errors import CheckpointError

from . import disk
from .disk import SUFFIX
from .file_format import (
    LONGEST_HEADER,
    Kind,
    Place,
    check_header,
    checksum,
    checksums_of,
    damaged,
    parsed,
    parsed_plain,
    require_checksum,
)

__all__ = ["Stored", "reading", "reading_plain", "regular"]

_IS_LITTLE = sys.byteorder == "little"


class Stored:
    """An open checkpoint with a valid header and index. ``index`` has the fields of ``_FIELDS``."""

    def __init__(
        self,
        path: str,
        file: int,
        index: Mapping[str, Any],
        places: Mapping[str, Place],
        advance: Callable[[int], None],
        kept_nbytes: int = 0,
    ) -> None:
        """``advance`` is told of the bytes that are read. So many bytes of small arrays are kept when they are checked,
        and not read again."""
        self._path = path
        self._file = file
        self._places = places
        self._advance = advance
        self._kept_nbytes = kept_nbytes
        #: Bytes of small arrays that have been checked, by their offset, and how many of them nobody has taken yet.
        self._kept: dict[int, tuple[memoryview, int]] = {}
        #: The checksums of the pieces of each array that has several, once it has been checked.
        self._of_pieces: dict[str, list[str]] = {}
        self.index = index
        self.keys: frozenset[str] = frozenset(places)

    def faults(self, keys: Sequence[str], dtype: str, shapes: Sequence[tuple[int, ...]]) -> list[str]:
        """An error text for each of the arrays ``keys`` that has another dtype or shape than these."""
        kinds = [self._places[key][2] for key in keys]
        if [kind.shape for kind in kinds] == shapes and {kind.dtype for kind in kinds} <= {dtype}:
            return []
        return [
            f"{key} is {kind.dtype}{list(kind.shape)} in the checkpoint, but {dtype}{list(shape)} here"
            for key, kind, shape in zip(keys, kinds, shapes, strict=True)
            if (kind.dtype, kind.shape) != (dtype, shape)
        ]

    def facts(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """The dtype, the shape and the bytes of each array, in the order of the file."""
        return {key: (kind.dtype, kind.shape, nbytes) for key, (_, nbytes, kind) in self._places.items()}

    def pieces(self, key: str) -> Iterator[memoryview]:
        """The bytes of the array ``key``, little-endian, in pieces of whole rows; each is valid until the next one."""
        for _, data in self._pieces(key):
            yield data.data

    def renamed(self, names: Mapping[str, str]) -> Stored:
        """The same open file, whose arrays and further names have other names."""
        index = dict(self.index)
        index["also"] = {names[way]: names[key] for way, key in index["also"].items()}
        if "checksums" in index:
            index["checksums"] = {names[key]: value for key, value in index["checksums"].items()}
        places = {names[key]: place for key, place in self._places.items()}
        return Stored(self._path, self._file, index, places, self._advance, self._kept_nbytes)

    def verify(self) -> None:
        """Check every array. Raises CheckpointDamagedError if one has changed since it was saved."""
        limit = disk.small_nbytes()
        small = [key for key, (_, nbytes, _) in self._places.items() if nbytes <= limit]
        places = [self._places[key] for key in small]
        # Of one piece, because the system gives the pages of many small ones more slowly.
        room = np.empty(min(self._kept_nbytes, sum(nbytes for _, nbytes, _ in places)), np.uint8)
        for group in _groups(places):
            begin, end = _span(places, group)
            is_kept = 0 < end - begin <= len(room)
            data = room[: end - begin] if is_kept else np.empty(end - begin, np.uint8)
            self._read_together([small[at] for at in group], [places[at] for at in group], data)
            if is_kept:
                self._kept[begin] = data.data, len(data)
                room = room[len(data) :]
        for key, (_, nbytes, _) in self._places.items():
            if nbytes > limit:
                self.check(key)

    def check(self, key: str) -> None:
        """Read and check the array ``key``, with memory for a piece of it. Raises as :meth:`verify`."""
        found, pieces = 0, []
        for _, data in self._pieces(key):
            found = zlib.crc32(data.data, found)
            pieces.append(checksum(data))
        self._require(key, f"{found:08x}")
        self._of_pieces[key] = pieces

    def array(self, key: str) -> np.ndarray:
        """The array ``key``. The returned bytes themselves have been checked. Raises as :meth:`verify`."""
        offset, nbytes, kind = self._places[key]
        data = np.empty(nbytes, np.uint8)
        self._read(offset, data)
        self._require(key, checksum(data))
        return self._native(kind, data, kind.shape)

    def small(self, keys: Sequence[str]) -> Iterator[tuple[list[int], memoryview]]:
        """The bytes of small arrays, in the machine's order and in any order of arrays: of those that follow each other
        together, with their places in ``keys``. The bytes have been checked. Raises as :meth:`verify`."""
        places = [self._places[key] for key in keys]
        begins = sorted(self._kept)
        ends = [begin + len(self._kept[begin][0]) for begin in begins]
        for group in _groups(places, {*begins, *ends}):
            begin, end = _span(places, group)
            block = bisect.bisect_right(begins, begin) - 1
            if block >= 0 and begin < end <= ends[block] and begins[block] in self._kept:
                data = self._take(begins[block], begin, end)
            else:
                read = np.empty(end - begin, np.uint8)
                self._read_together([keys[at] for at in group], [places[at] for at in group], read)
                data = read.data
            yield group, data if _IS_LITTLE else self._turned(data, [places[at] for at in group])

    def _take(self, block: int, begin: int, end: int) -> memoryview:
        """Bytes of the file that were kept. When all bytes of their block have been taken, it is forgotten."""
        data, left = self._kept[block]
        self._kept[block] = data, left - (end - begin)
        if left <= end - begin:
            del self._kept[block]
        return data[begin - block : end - block]

    def _read_together(self, keys: Sequence[str], places: Sequence[Place], into: np.ndarray) -> None:
        """Read small arrays that follow each other in the file, and check each."""
        begin, expected, crc32 = places[0][0], self.index.get("checksums"), zlib.crc32
        self._read(begin, into)
        if expected is not None:
            data = into.data
            found = checksums_of([crc32(data[at - begin : at - begin + nbytes]) for at, nbytes, _ in places])
            if found != [expected[key] for key in keys]:
                for key, each in zip(keys, found, strict=True):
                    self._require(key, each)

    def _turned(self, data: memoryview, places: Iterable[Place]) -> memoryview:
        """The bytes of these arrays in the order of a machine that is not little-endian."""
        turned, at = bytearray(), 0
        for _, nbytes, kind in places:
            turned += self._native(kind, np.frombuffer(data[at : at + nbytes], np.uint8), kind.shape).tobytes()
            at += nbytes
        return memoryview(turned)

    def _read(self, offset: int, into: np.ndarray) -> None:
        _read_at(self._path, self._file, into.data, offset)
        self._advance(into.nbytes)

    def rows(self, key: str) -> Iterator[tuple[int, np.ndarray]]:
        """The array ``key`` in pieces of whole rows: the number of the first row, and the rows, which are valid until
        the next piece. The bytes of each piece have been checked. Raises as :meth:`verify`."""
        if key not in self._of_pieces:
            self.check(key)
        kind = self._places[key][2]
        for (first, data), expected in zip(self._pieces(key), self._of_pieces[key], strict=True):
            if (found := checksum(data)) != expected:
                raise damaged(self._path, f"the checksum of {key} from row {first} is {found}, but was {expected}")
            yield first, self._native(kind, data, (-1, *kind.shape[1:]))

    def unchecked_rows(self, key: str, first: int, stop: int) -> np.ndarray:
        """Rows of the array ``key``, from one number to below another, of a file that has no checksums."""
        offset, total, kind = self._places[key]
        row = total // kind.shape[0]
        data = np.empty((stop - first) * row, np.uint8)
        self._read(offset + first * row, data)
        return self._native(kind, data, (-1, *kind.shape[1:]))

    def _pieces(self, key: str) -> Iterator[tuple[int, np.ndarray]]:
        """The bytes of an array in pieces of whole rows, with the number of the first row. One buffer serves all."""
        offset, total, kind = self._places[key]
        row = total // kind.shape[0] if kind.shape and total else total
        step = max(row, disk.PART // row * row) if row else 1
        buffer = np.empty(min(step, total), np.uint8)
        for begin in range(0, total, step):
            data = buffer[: min(step, total - begin)]
            self._read(offset + begin, data)
            yield begin // row, data

    @staticmethod
    def _native(kind: Kind, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        stored = np.dtype(kind.dtype).newbyteorder("<")
        return data.view(stored).reshape(shape).astype(kind.dtype, copy=False)

    def _require(self, key: str, found: str) -> None:
        """Raise CheckpointDamagedError if the checksum of an array is not that of the index."""
        if "checksums" in self.index:
            require_checksum(self._path, key, found, self.index["checksums"][key])


def _groups(places: Sequence[Place], edges: Collection[int] = ()) -> Iterator[list[int]]:
    """These places, by number and in the order in which they lie, in groups that lie side by side and are small
    together. A group begins at each of the ``edges`` of the file."""
    group: list[int] = []
    end, most, limit = -1, 0, disk.small_nbytes()
    for at in sorted(range(len(places)), key=places.__getitem__):
        offset, nbytes, _ = places[at]
        stop = offset + nbytes
        if offset != end or stop > most or offset in edges:
            if group:
                yield group
            group, most = [], offset + limit
        group.append(at)
        end = stop
    if group:
        yield group


def _span(places: Sequence[Place], group: Sequence[int]) -> tuple[int, int]:
    """From where to where a group of places lies."""
    last, nbytes, _ = places[group[-1]]
    return places[group[0]][0], last + nbytes


@contextlib.contextmanager
def reading(path: str, doing: str = "restoring", *, from_disk: bool = False, kept_nbytes: int = 0) -> Iterator[Stored]:
    """Open a checkpoint and check its header and index. The same open file is read until the end, whatever ``path``
    names meanwhile. A bar says what the caller is ``doing``. ``from_disk``: not what the system still has in memory.
    ``kept_nbytes``: as for :class:`Stored`.

    Raises CheckpointError if there is none or this version does not read its format, CheckpointDamagedError if it is
    damaged or renamed, OSError if the file system refuses.
    """
    with regular(path, from_disk) as (file, size):
        header = _header_of(path, file, size)
        index, places = parsed(path, header, size)
        twice = 2 * sum(nbytes for _, nbytes, _ in places.values())  # to check all, and to set all
        with automatic(f"{doing} {os.path.basename(path)}", twice, "B") as advance:
            yield Stored(path, file, index, places, advance, kept_nbytes)


@contextlib.contextmanager
def reading_plain(path: str) -> Iterator[Stored]:
    """As :func:`reading`, for a safetensors file of any program: its index is empty, and it has no checksums."""
    with regular(path) as (file, size):
        places = parsed_plain(path, _header_of(path, file, size), size)
        yield Stored(path, file, {"also": {}}, places, lambda count: None)


@contextlib.contextmanager
def regular(path: str, from_disk: bool = False) -> Iterator[tuple[int, int]]:
    """An open regular file, and its size. Raises as :func:`reading`."""
    file = _open(path)
    try:
        if from_disk:
            disk.forget_cached(file)
        size = disk.size_of(file)
        if size is None:
            raise damaged(path, "it is not a regular file")
        yield file, size
    finally:
        disk.close(file)


def _open(path: str) -> int:
    try:
        return disk.open_to_read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.islink(path):
            raise damaged(path, "it is a link to a file that does not exist") from error
        hint = disk.newest_in(path.removesuffix(SUFFIX))
        raise CheckpointError(f"there is no checkpoint {path}{hint}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise damaged(path, "it is a link that leads back to itself") from error
        if error.errno == errno.ENXIO:
            raise damaged(path, "it is not a regular file") from error
        raise OSError(
            error.errno, f"{error.strerror}; make it readable, or restore another checkpoint", path
        ) from error


def _read_at(path: str, file: int, into: memoryview, offset: int) -> None:
    """Fill ``into`` from the file."""
    while into:
        try:
            count = disk.read_at(file, into, offset)
        except OSError as error:
            raise damaged(path, f"it cannot be read from the disk ({error.strerror})") from error
        if not count:
            raise damaged(path, f"it ends at byte {offset}, and {len(into)} bytes are missing")
        into, offset = into[count:], offset + count


def _header_of(path: str, file: int, size: int) -> bytearray:
    """The header, checked if it has a checksum."""
    word = bytearray(8)
    _read_at(path, file, memoryview(word), 0)
    nbytes = int.from_bytes(word, "little")
    most = min(size - 8, LONGEST_HEADER)
    if nbytes > most:
        raise damaged(path, f"its header claims {nbytes} bytes, but at most {most} are possible")
    header = bytearray(nbytes)
    _read_at(path, file, memoryview(header), 8)
    check_header(path, header)
    return header
