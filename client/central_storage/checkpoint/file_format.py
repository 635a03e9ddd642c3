"""The format of a checkpoint's file: how a header is made, and what is checked of one. It reads no file.

``writing`` writes a file, and ``stored`` reads it.

A file has the safetensors format: eight bytes with the length of the header (little-endian), the header (JSON), and
the bytes of the arrays without a gap. The header begins with a CRC-32 of the rest of the header. Its index (JSON in the
metadata under ``central_storage``) has a CRC-32 of every array. So a change of any byte of the file is detected. The
index also has the name of the file, so a file that is renamed to another number is detected, too.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from cs_proto.arrays import dtype_name
from cs_proto.errors import CheckpointDamagedError, CheckpointError
from cs_proto.frozen import frozen
from cs_proto.printable import printable

from .disk import SUFFIX

__all__ = [
    "FORMAT",
    "LARGEST_NUMBER",
    "LONGEST_HEADER",
    "METADATA",
    "NO_CHECKSUM",
    "SUFFIX",
    "Kind",
    "Names",
    "Place",
    "Shaped",
    "check_header",
    "checksum",
    "checksums_of",
    "damaged",
    "header_of_format_2",
    "holds",
    "parsed",
    "parsed_plain",
    "places_of",
    "plain_header",
    "require_checksum",
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
#: Of a checkpoint.
LARGEST_NUMBER = 2**63 - 1
_PAIRS = {"complex64": "F32", "complex128": "F64"}  # safetensors has no dtype for a complex128
_DTYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign[:1].upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
# A text as JSON. ``json.dumps`` looks at its options first, and there may be thousands of names.
_quoted = json.encoder.encode_basestring_ascii
_NAMES = {stored: name for name, stored in _DTYPES.items()}
_NO_PLACE = "its header does not give the dtype, shape and place of {}"
_NUMBERED = re.compile(rf".*-\d+{re.escape(SUFFIX)}", re.DOTALL)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # a bool is not a count


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_NUMBER


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
    "save_counter": _Field(f"a whole number from 0 to {LARGEST_NUMBER}", _is_number, 1, is_optional=True),
    "name": _Field("a string", _is_text, 2),
    "checksums": _Field("an object of strings", _are_texts, 2),
}


# --- the header ---------------------------------------------------------------------------------------------------


class Shaped(Protocol):
    """Arrays of one dtype that follow each other in a file."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def keys(self) -> Sequence[str]: ...
    @property
    def shapes(self) -> Sequence[tuple[int, ...]]: ...


def plain_header(blocks: Iterable[Shaped]) -> bytes:
    """The header, with its length, of a safetensors file with these arrays, in this order."""
    text = f"{{{places_of(blocks)[0]}}}".encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def places_of(blocks: Iterable[Shaped]) -> tuple[str, int]:
    """The places of arrays that follow each other in this order, as they stand in a header, and their bytes."""
    texts: list[str] = []
    end = 0
    for block in blocks:
        dtype = block.dtype
        kinds = {shape: (_text_of(dtype, shape), math.prod(shape) * dtype.itemsize) for shape in set(block.shapes)}
        for key, shape in zip(block.keys, block.shapes, strict=True):
            text, nbytes = kinds[shape]
            begin, end = end, end + nbytes
            texts.append(f'{_quoted(key)}: {{{text}, "data_offsets": [{begin}, {end}]}}')
    return ", ".join(texts), end


def holds(dtype: np.dtype[Any]) -> bool:
    """Whether a file can hold arrays of this dtype."""
    return dtype_name(dtype) in _DTYPES or dtype_name(dtype) in _PAIRS


def _text_of(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    name = dtype_name(dtype)
    stored = [*shape, 2] if name in _PAIRS else list(shape)
    return json.dumps({"dtype": _PAIRS.get(name) or _DTYPES[name], "shape": stored})[1:-1]


class Names:
    """The names of a file's arrays in the order of their checksums, which are known later than the names."""

    def __init__(self, keys: Iterable[str]) -> None:
        # A quoted text has no line break, and no character that another quoting would change but these two.
        quoted = "\n".join(map(_quoted, keys)).replace("\\", "\\\\").replace('"', '\\"')
        self._twice_quoted = quoted.split("\n") if quoted else []

    def with_checksums(self, checksums: Iterable[str]) -> str:
        """A JSON object of the checksums by name, as it stands in a JSON text within JSON."""
        pairs = zip(self._twice_quoted, checksums, strict=True)
        return "{" + ", ".join([f'{name}: \\"{checksum}\\"' for name, checksum in pairs]) + "}"


def header_of_format_2(own: Mapping[str, Any], checksums: str, index: Mapping[str, Any], places: str) -> bytes:
    """The header of a file with these ``places``, with room for its checksum, which :func:`sealed` sets. The checksums
    come from :class:`Names`; ``own`` are the fields before them, ``index`` those behind them."""
    before = _quoted(json.dumps({"format": FORMAT, **own})[:-1])[:-1]
    behind = _quoted(json.dumps(index)[1:])[1:]
    text = f'{before}, \\"checksums\\": {checksums}, {behind}'
    begun = json.dumps({METADATA: {_CHECKSUM: NO_CHECKSUM}})[:-2]
    return f'{begun}, "{_INDEX}": {text}}}{", " * bool(places)}{places}}}'.encode()


def sealed(header: bytes) -> bytes:
    """A header with its checksum."""
    return _START + _checksum_of_header(header).encode() + header[len(_START) + len(NO_CHECKSUM) :]


# --- checksums ----------------------------------------------------------------------------------------------------


def checksum(data: Any) -> str:
    """The CRC-32 of bytes, as eight digits."""
    return f"{zlib.crc32(data):08x}"


def checksums_of(found: Sequence[int]) -> list[str]:
    """CRC-32s as :func:`checksum` has them."""
    return np.array(found, ">u4").tobytes().hex(" ", 4).split()


def require_checksum(path: str, what: str, found: str, expected: str) -> None:
    """Raise CheckpointDamagedError if the checksum that was found is not the expected one."""
    if found != expected:
        raise damaged(path, f"the checksum of {what} is {found}, but was {expected} when it was saved")


def check_header(path: str, header: bytearray) -> None:
    """Raise CheckpointDamagedError if a header has another checksum than the one that it begins with. Only those of
    format 2 have one."""
    if header.startswith(_START):
        said = header[len(_START) : len(_START) + len(NO_CHECKSUM)].decode(errors="replace")
        require_checksum(path, "its header", _checksum_of_header(header), said)


def _checksum_of_header(header: bytes | bytearray) -> str:
    """The checksum of a header of format 2 without the checksum that it begins with."""
    rest = memoryview(header)[len(_START) + len(NO_CHECKSUM) :]
    return f"{zlib.crc32(rest, zlib.crc32(_START)):08x}"


def damaged(path: str, what: str) -> CheckpointDamagedError:
    """An error that says what is wrong with a file."""
    return CheckpointDamagedError(
        f"{path} is damaged: {printable(what):.2000}; restore another checkpoint, or an intact copy of this one"
    )


# --- reading ------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A dtype and a shape in a header, as NumPy has them; ``nbytes`` is -1 for a dtype that NumPy lacks."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


Place: TypeAlias = tuple[int, int, Kind]
"""The place of an array in the file: the offset, the bytes, the dtype and shape. Thousands are made at once."""


def parsed(path: str, header: bytearray, size: int) -> tuple[dict[str, Any], dict[str, Place]]:
    """The index, and the places of the arrays, which fill a file of ``size`` bytes behind its header. ``path`` is for
    errors; nothing is read.

    Raises CheckpointError for a format that this version does not read, CheckpointDamagedError if the header is damaged
    or the file is renamed.
    """
    entries = _object(path, "its header", header)
    metadata = entries.pop(METADATA, None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_INDEX), str):
        raise damaged(path, "it is a safetensors file, but not a checkpoint of central-storage")
    index = _object(path, "its index", metadata[_INDEX])
    number = index.get("format")
    if not _is_count(number):
        raise damaged(path, f"the format in its index is {number!r:.80}, which is not a whole number")
    is_sealed = header.startswith(_START)
    if number not in (1, FORMAT):
        raise CheckpointError(
            f"{path} has format {number!r:.80}, but this version reads formats 1 to {FORMAT}; use the version of "
            "central-storage that saved it"
        )
    if is_sealed != (number == FORMAT):
        raise damaged(path, f"its index has format {number}, but its header belongs to another format")
    _check_index(path, index)
    name = os.path.basename(path)
    if is_sealed and _NUMBERED.fullmatch(name) and name != index["name"]:
        raise CheckpointDamagedError(
            f"{path} was saved as {printable(index['name'])}, so it is another checkpoint; rename it to that, or "
            "to a name that does not end in a number"
        )
    places = _places(path, entries, index["complex"], 8 + len(header), size)
    _check_names(path, index, places)
    return index, places


def parsed_plain(path: str, header: bytearray, size: int) -> dict[str, Place]:
    """As :func:`parsed`, of a safetensors file of any program: the places of its arrays."""
    entries = _object(path, "its header", header)
    entries.pop(METADATA, None)
    return _places(path, entries, {}, 8 + len(header), size)


def _places(
    path: str, entries: Mapping[str, Any], complex_: Mapping[str, str], begin: int, end: int
) -> dict[str, Place]:
    """The places of the arrays, which fill the file from ``begin`` to ``end``."""
    kinds: dict[tuple[str, str, str | None], Kind] = {}
    places: dict[str, Place] = {}
    shapes: list[list[Any]] = []
    at, is_in_order, kind = begin, True, Kind("", (), 0)
    before_dtype: Any = ...  # what no JSON is equal to
    before_shape: Any = ...
    before_complex: str | None = None
    for key, entry in entries.items():
        try:
            dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, _NO_PLACE.format(key)) from error
        name = complex_.get(key) if complex_ else None
        if shape != before_shape or dtype != before_dtype or name != before_complex:
            before_dtype, before_shape, before_complex = dtype, shape, name
            kind = _kind(path, key, dtype, shape, name, kinds)
        if type(first) is not int or type(last) is not int or not 0 <= first <= last:
            raise damaged(path, _NO_PLACE.format(key))
        if kind.nbytes >= 0 and last - first != kind.nbytes:
            raise damaged(path, f"{key} has {last - first} bytes, which does not match {_NAMES[dtype]}{shape}")
        offset = begin + first
        places[key] = offset, last - first, kind
        shapes.append(shape)
        if offset != at:
            is_in_order = False
        at = begin + last
    if not set(map(type, itertools.chain.from_iterable(shapes))) <= {int}:  # true is equal to the 1 of the array before
        key = next(key for key, shape in zip(places, shapes, strict=True) if not all(map(_is_count, shape)))
        raise damaged(path, _NO_PLACE.format(key))
    if not is_in_order:
        at = begin
        for place in sorted(places.values()):
            offset, nbytes, _ = place
            if offset != at:
                key = next(key for key in places if places[key] is place)
                begins = f"{key} begins at byte {offset - begin} of the arrays"
                raise damaged(path, f"{begins}, but must begin at {at - begin}")
            at += nbytes
    if at != end:
        raise damaged(path, f"its arrays take {at - begin} bytes, but the file has {end - begin} for them")
    return places


def _object(path: str, what: str, text: bytearray | str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{what} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise damaged(path, f"{what} is not a JSON object")
    return found


def _check_index(path: str, index: Mapping[str, Any]) -> None:
    known = {name: kind for name, kind in _FIELDS.items() if kind.since <= index["format"]}
    for name, value in index.items():
        if name not in known:
            raise damaged(path, f"its index has a field {name!r:.80}, which this version does not know")
        if not known[name].fits(value):
            raise damaged(path, f"the field {name!r} of its index is {value!r:.80}, but must be {known[name].kind}")
    lacking = [name for name, kind in known.items() if not kind.is_optional and name not in index]
    if lacking:
        raise damaged(path, f"its index has no field {lacking[0]!r}")


def _kind(
    path: str, key: str, dtype: Any, shape: Any, complex_: str | None, kinds: dict[tuple[str, str, str | None], Kind]
) -> Kind:
    """The dtype and shape of an array according to the header, and to the index if it is ``complex_``. ``kinds`` keeps
    what has been checked."""
    has_types = type(dtype) is str and type(shape) is list and dtype not in _DTYPES and dtype not in _PAIRS
    if has_types and (known := (dtype, str(shape), complex_)) in kinds:  # the text tells 1 from true
        return kinds[known]
    if not has_types or not all(map(_is_count, shape)):
        raise damaged(path, _NO_PLACE.format(key))
    name = _NAMES.get(dtype, dtype)
    nbytes = math.prod(shape) * np.dtype(name).itemsize if dtype in _NAMES else -1
    kind = Kind(name, tuple(shape), nbytes)
    if complex_ is not None:
        if _PAIRS.get(complex_) != dtype or shape[-1:] != [2]:
            raise damaged(path, f"{key} is {name}{shape} in its header, but {complex_:.80} in its index")
        kind = Kind(complex_, tuple(shape[:-1]), nbytes)
    kinds[known] = kind
    return kind


def _check_names(path: str, index: Mapping[str, Any], places: Mapping[str, Place]) -> None:
    """Check that the index names the arrays of the file."""
    checksums = index.get("checksums", places)
    is_whole = checksums.keys() == places.keys()
    for named in (index["complex"], index["also"].values(), () if is_whole else checksums):
        if more := set(named) - places.keys():
            raise damaged(path, f"its index names {min(more)}, but it does not hold that array")
    if not is_whole:
        raise damaged(path, f"its index has no checksum for {min(places.keys() - checksums.keys())}")
