"""The format of a checkpoint's file, and how a file is read and checked. ``writing`` writes it.

A file has the safetensors format: eight bytes with the length of the header (little-endian), the header (JSON), and
the bytes of the arrays without a gap. The header begins with a CRC-32 of the rest of the header. Its index (JSON in the
metadata under ``central_storage``) has a CRC-32 of every array. So a change of any byte of the file is detected. The
index also has the name of the file, so a file that is renamed to another number is detected, too.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from central_storage.diagnostics.bars import automatic
from cs_proto.arrays import dtype_name
from cs_proto.errors import CheckpointDamagedError, CheckpointError
from cs_proto.frozen import frozen

from . import disk
from .disk import SUFFIX

__all__ = [
    "FORMAT",
    "LONGEST_HEADER",
    "METADATA",
    "NO_CHECKSUM",
    "SUFFIX",
    "Stored",
    "checksum",
    "header_of_format_2",
    "places_of",
    "plain_header",
    "reading",
    "reading_plain",
    "sealed",
]

# Goes up when a file changes in a way that an older reader cannot read. Format 1 has neither checksums nor a name.
FORMAT = 2
#: The name in the header that is no array.
METADATA = "__metadata__"
_INDEX = "central_storage"
_CHECKSUM = "central_storage_crc32"
#: How the header of a file of format 2 begins. The eight digits of its checksum come next.
_START = f'{{"__metadata__": {{"{_CHECKSUM}": "'.encode()
NO_CHECKSUM = "0" * 8
#: Readers of safetensors refuse a longer header. Bytes.
LONGEST_HEADER = 100_000_000
_PAIRS = {"complex64": "F32", "complex128": "F64"}  # safetensors has no dtype for a complex128
_DTYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign[:1].upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
_NAMES = {stored: name for name, stored in _DTYPES.items()}
_NO_PLACE = "its header does not give the dtype, shape and place of {}"
_IS_LITTLE = sys.byteorder == "little"
_NUMBERED = re.compile(rf".*-\d+{re.escape(SUFFIX)}", re.DOTALL)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # a bool is not a count


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and set(map(type, value.values())) <= {str}


@frozen
class _Field:
    """A field of the index."""

    kind: str
    fits: Callable[[object], bool]
    #: The first format that has it.
    since: int
    is_optional: bool = False


# A field that is not listed is refused: skipping a field of a newer version would restore a different state.
_FIELDS: Mapping[str, _Field] = {
    "format": _Field("a whole number", _is_count, 1),
    "also": _Field("an object of strings", _are_texts, 1),
    "complex": _Field("an object of strings", _are_texts, 1),
    "save_counter": _Field("a whole number from 0", _is_count, 1, is_optional=True),
    "name": _Field("a string", _is_text, 2),
    "checksums": _Field("an object of strings", _are_texts, 2),
}


# --- the header ---------------------------------------------------------------------------------------------------


class Shaped(Protocol):
    """An array that has a place in a header."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def plain_header(arrays: Mapping[str, Shaped]) -> bytes:
    """The header, with its length, of a safetensors file with these arrays, in this order."""
    text = f"{{{places_of(arrays)[0]}}}".encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def places_of(arrays: Mapping[str, Shaped]) -> tuple[str, int]:
    """The places of arrays that follow each other in this order, as they stand in a header, and their bytes."""
    texts: list[str] = []
    kinds: dict[tuple[np.dtype[Any], tuple[int, ...]], tuple[str, int]] = {}
    end = 0
    for key, array in arrays.items():
        dtype, shape = array.dtype, array.shape
        if (kind := kinds.get((dtype, shape))) is None:
            kind = kinds[dtype, shape] = _text_of(dtype, shape), math.prod(shape) * dtype.itemsize
        begin, end = end, end + kind[1]
        texts.append(f'{json.dumps(key)}: {{{kind[0]}, "data_offsets": [{begin}, {end}]}}')
    return ", ".join(texts), end


def _text_of(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    name = dtype_name(dtype)
    stored = [*shape, 2] if name in _PAIRS else list(shape)
    return json.dumps({"dtype": _PAIRS.get(name) or _DTYPES[name], "shape": stored})[1:-1]


def header_of_format_2(index: Mapping[str, Any], places: str) -> bytes:
    """The header of a file with these ``places``, with room for its checksum, which :func:`sealed` sets."""
    metadata = {_CHECKSUM: NO_CHECKSUM, _INDEX: json.dumps({"format": FORMAT, **index})}
    begun = json.dumps({METADATA: metadata})[:-1]
    return f"{begun}{', ' * bool(places)}{places}}}".encode()


def sealed(header: bytes) -> bytes:
    """A header with its checksum."""
    return _START + _checksum_of_header(header).encode() + header[len(_START) + len(NO_CHECKSUM) :]


# --- checksums ----------------------------------------------------------------------------------------------------


def checksum(data: Any) -> str:
    """The CRC-32 of bytes, as eight digits."""
    return f"{zlib.crc32(data):08x}"


def _require_checksum(path: str, what: str, found: str, expected: str) -> None:
    """Raise CheckpointDamagedError if the checksum that was found is not the expected one."""
    if found != expected:
        raise _damaged(path, f"the checksum of {what} is {found}, but was {expected} when it was saved")


def _checksum_of_header(header: bytes | bytearray) -> str:
    """The checksum of a header of format 2 without the checksum that it begins with."""
    rest = memoryview(header)[len(_START) + len(NO_CHECKSUM) :]
    return f"{zlib.crc32(rest, zlib.crc32(_START)):08x}"


def _damaged(path: str, what: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"{path} is damaged: {what}; restore another checkpoint, or an intact copy of this one"
    )


# --- reading ------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """A dtype and a shape in a header, as NumPy has them; ``nbytes`` is -1 for a dtype that NumPy lacks."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


_Place: TypeAlias = tuple[int, int, _Kind]
"""The place of an array in the file: the offset, the bytes, the dtype and shape. Thousands are made at once."""


class Stored:
    """An open checkpoint with a valid header and index. ``index`` has the fields of ``_FIELDS``."""

    def __init__(
        self,
        path: str,
        file: int,
        index: Mapping[str, Any],
        places: Mapping[str, _Place],
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
            self._read_together([small[at] for at in group], data)
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
                self._read_together([keys[at] for at in group], read)
                data = read.data
            yield group, data if _IS_LITTLE else self._turned(data, [places[at] for at in group])

    def _take(self, block: int, begin: int, end: int) -> memoryview:
        """Bytes of the file that were kept. When all bytes of their block have been taken, it is forgotten."""
        data, left = self._kept[block]
        self._kept[block] = data, left - (end - begin)
        if left <= end - begin:
            del self._kept[block]
        return data[begin - block : end - block]

    def _read_together(self, keys: Sequence[str], into: np.ndarray) -> None:
        """Read small arrays that follow each other in the file, and check each."""
        places = [self._places[key] for key in keys]
        begin, expected, crc32 = places[0][0], self.index.get("checksums"), zlib.crc32
        self._read(begin, into)
        if expected is not None:
            data = into.data
            found = [f"{crc32(data[at - begin : at - begin + nbytes]):08x}" for at, nbytes, _ in places]
            if found != [expected[key] for key in keys]:
                for key, each in zip(keys, found, strict=True):
                    self._require(key, each)

    def _turned(self, data: memoryview, places: Iterable[_Place]) -> memoryview:
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
                raise _damaged(self._path, f"the checksum of {key} from row {first} is {found}, but was {expected}")
            yield first, self._native(kind, data, (-1, *kind.shape[1:]))

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
    def _native(kind: _Kind, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        stored = np.dtype(kind.dtype).newbyteorder("<")
        return data.view(stored).reshape(shape).astype(kind.dtype, copy=False)

    def _require(self, key: str, found: str) -> None:
        """Raise CheckpointDamagedError if the checksum of an array is not that of the index."""
        if "checksums" in self.index:
            _require_checksum(self._path, key, found, self.index["checksums"][key])


def _groups(places: Sequence[_Place], edges: Collection[int] = ()) -> Iterator[list[int]]:
    """These places, by number and in the order in which they lie, in groups that lie side by side and are small
    together. A group begins at each of the ``edges`` of the file."""
    group: list[int] = []
    end, most, limit = -1, 0, disk.small_nbytes()
    for at in sorted(range(len(places)), key=places.__getitem__):
        offset, nbytes, _ = places[at]
        if offset != end or offset + nbytes > most or offset in edges:
            if group:
                yield group
            group, most = [], offset + limit
        group.append(at)
        end = offset + nbytes
    if group:
        yield group


def _span(places: Sequence[_Place], group: Sequence[int]) -> tuple[int, int]:
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
    with _opened(path, from_disk) as (file, size, header):
        index, places = _parsed(path, header, 8 + len(header), size)
        twice = 2 * sum(nbytes for _, nbytes, _ in places.values())  # to check all, and to set all
        with automatic(f"{doing} {os.path.basename(path)}", twice, "B") as advance:
            yield Stored(path, file, index, places, advance, kept_nbytes)


@contextlib.contextmanager
def reading_plain(path: str) -> Iterator[Stored]:
    """As :func:`reading`, for a safetensors file of any program: its index is empty, and it has no checksums."""
    with _opened(path) as (file, size, header):
        entries = _object(path, "its header", header)
        entries.pop(METADATA, None)
        yield Stored(path, file, {"also": {}}, _places(path, entries, {}, 8 + len(header), size), lambda count: None)


@contextlib.contextmanager
def _opened(path: str, from_disk: bool = False) -> Iterator[tuple[int, int, bytearray]]:
    """An open regular file, its size, and its header."""
    file = _open(path)
    try:
        if from_disk:
            disk.forget_cached(file)
        size = disk.size_of(file)
        if size is None:
            raise _damaged(path, "it is not a regular file")
        yield file, size, _header_of(path, file, size)
    finally:
        disk.close(file)


def _open(path: str) -> int:
    try:
        return disk.open_to_read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.islink(path):
            raise _damaged(path, "it is a link to a file that does not exist") from error
        hint = disk.newest_in(path.removesuffix(SUFFIX))
        raise CheckpointError(f"there is no checkpoint {path}{hint}") from error
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}; make it readable, or restore another checkpoint", path
        ) from error


def _read_at(path: str, file: int, into: memoryview, offset: int) -> None:
    """Fill ``into`` from the file."""
    while into:
        try:
            count = disk.read_at(file, into, offset)
        except OSError as error:
            raise _damaged(path, f"it cannot be read from the disk ({error.strerror})") from error
        if not count:
            raise _damaged(path, f"it ends at byte {offset}, and {len(into)} bytes are missing")
        into, offset = into[count:], offset + count


def _header_of(path: str, file: int, size: int) -> bytearray:
    """The header, checked if it has a checksum."""
    word = bytearray(8)
    _read_at(path, file, memoryview(word), 0)
    nbytes = int.from_bytes(word, "little")
    most = min(size - 8, LONGEST_HEADER)
    if nbytes > most:
        raise _damaged(path, f"its header claims {nbytes} bytes, but at most {most} are possible")
    header = bytearray(nbytes)
    _read_at(path, file, memoryview(header), 8)
    if header.startswith(_START):
        said = header[len(_START) : len(_START) + len(NO_CHECKSUM)].decode(errors="replace")
        _require_checksum(path, "its header", _checksum_of_header(header), said)
    return header


def _parsed(path: str, header: bytearray, begin: int, end: int) -> tuple[dict[str, Any], dict[str, _Place]]:
    """The index, and the places of the arrays, which fill the file from ``begin`` to ``end``."""
    entries = _object(path, "its header", header)
    metadata = entries.pop(METADATA, None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_INDEX), str):
        raise _damaged(path, "it is a safetensors file, but not a checkpoint of central-storage")
    index = _object(path, "its index", metadata[_INDEX])
    number = index.get("format")
    if not _is_count(number):
        raise _damaged(path, f"the format in its index is {number!r:.80}, which is not a whole number")
    is_sealed = header.startswith(_START)
    if number not in (1, FORMAT):
        raise CheckpointError(
            f"{path} has format {number!r:.80}, but this version reads formats 1 to {FORMAT}; use the version of "
            "central-storage that saved it"
        )
    if is_sealed != (number == FORMAT):
        raise _damaged(path, f"its index has format {number}, but its header belongs to another format")
    _check_index(path, index)
    name = os.path.basename(path)
    if is_sealed and _NUMBERED.fullmatch(name) and name != index["name"]:
        raise CheckpointDamagedError(
            f"{path} was saved as {index['name']}, so it is another checkpoint; rename it to that, or to a name that "
            "does not end in a number"
        )
    places = _places(path, entries, index["complex"], begin, end)
    _check_names(path, index, places)
    return index, places


def _places(
    path: str, entries: Mapping[str, Any], complex_: Mapping[str, str], begin: int, end: int
) -> dict[str, _Place]:
    """The places of the arrays, which fill the file from ``begin`` to ``end``."""
    kinds: dict[tuple[str, str, str | None], _Kind] = {}
    places: dict[str, _Place] = {}
    shapes: list[list[Any]] = []
    at, is_in_order, kind = begin, True, _Kind("", (), 0)
    before: list[Any] = [..., ..., ...]  # what no JSON is equal to
    for key, entry in entries.items():
        try:
            dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, _NO_PLACE.format(key)) from error
        if shape != before[1] or dtype != before[0] or complex_.get(key) != before[2]:
            before = [dtype, shape, complex_.get(key)]
            kind = _kind(path, key, dtype, shape, before[2], kinds)
        if type(first) is not int or type(last) is not int or not 0 <= first <= last:
            raise _damaged(path, _NO_PLACE.format(key))
        if kind.nbytes >= 0 and last - first != kind.nbytes:
            raise _damaged(path, f"{key} has {last - first} bytes, which does not match {_NAMES[dtype]}{shape}")
        places[key] = begin + first, last - first, kind
        shapes.append(shape)
        is_in_order = is_in_order and at == begin + first
        at = begin + last
    if not set(map(type, itertools.chain.from_iterable(shapes))) <= {int}:  # true is equal to the 1 of the array before
        key = next(key for key, shape in zip(places, shapes, strict=True) if not all(map(_is_count, shape)))
        raise _damaged(path, _NO_PLACE.format(key))
    if not is_in_order:
        at = begin
        for place in sorted(places.values()):
            offset, nbytes, _ = place
            if offset != at:
                key = next(key for key in places if places[key] is place)
                begins = f"{key} begins at byte {offset - begin} of the arrays"
                raise _damaged(path, f"{begins}, but must begin at {at - begin}")
            at += nbytes
    if at != end:
        raise _damaged(path, f"its arrays take {at - begin} bytes, but the file has {end - begin} for them")
    return places


def _object(path: str, what: str, text: bytearray | str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{what} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _damaged(path, f"{what} is not a JSON object")
    return found


def _check_index(path: str, index: Mapping[str, Any]) -> None:
    known = {name: kind for name, kind in _FIELDS.items() if kind.since <= index["format"]}
    for name, value in index.items():
        if name not in known:
            raise _damaged(path, f"its index has a field {name!r:.80}, which this version does not know")
        if not known[name].fits(value):
            raise _damaged(path, f"the field {name!r} of its index is {value!r:.80}, but must be {known[name].kind}")
    lacking = [name for name, kind in known.items() if not kind.is_optional and name not in index]
    if lacking:
        raise _damaged(path, f"its index has no field {lacking[0]!r}")


def _kind(
    path: str, key: str, dtype: Any, shape: Any, complex_: str | None, kinds: dict[tuple[str, str, str | None], _Kind]
) -> _Kind:
    """The dtype and shape of an array according to the header, and to the index if it is ``complex_``. ``kinds`` keeps
    what has been checked."""
    has_types = type(dtype) is str and type(shape) is list and dtype not in _DTYPES and dtype not in _PAIRS
    if has_types and (known := (dtype, str(shape), complex_)) in kinds:  # the text tells 1 from true
        return kinds[known]
    if not has_types or not all(map(_is_count, shape)):
        raise _damaged(path, _NO_PLACE.format(key))
    name = _NAMES.get(dtype, dtype)
    nbytes = math.prod(shape) * np.dtype(name).itemsize if dtype in _NAMES else -1
    kind = _Kind(name, tuple(shape), nbytes)
    if complex_ is not None:
        if _PAIRS.get(complex_) != dtype or shape[-1:] != [2]:
            raise _damaged(path, f"{key} is {name}{shape} in its header, but {complex_:.80} in its index")
        kind = _Kind(complex_, tuple(shape[:-1]), nbytes)
    kinds[known] = kind
    return kind


def _check_names(path: str, index: Mapping[str, Any], places: Mapping[str, _Place]) -> None:
    """Check that the index names the arrays of the file."""
    checksums = index.get("checksums", places)
    is_whole = checksums.keys() == places.keys()
    for named in (index["complex"], index["also"].values(), () if is_whole else checksums):
        if more := set(named) - places.keys():
            raise _damaged(path, f"its index names {min(more)}, but it does not hold that array")
    if not is_whole:
        raise _damaged(path, f"its index has no checksum for {min(places.keys() - checksums.keys())}")
