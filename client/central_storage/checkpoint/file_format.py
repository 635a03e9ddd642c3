"""The file of a checkpoint: how it is written atomically, and how it is read back and checked.

A file has the safetensors format: eight bytes with the length of the header (little-endian), the header (JSON), and
the bytes of the arrays without a gap. The header begins with a CRC-32 of the rest of the header. Its index (JSON in the
metadata under ``central_storage``) has a CRC-32 of every array. So a change of any byte of the file is detected. The
index also has the name of the file, so a file that is renamed to another number is detected, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from central_storage.diagnostics.bars import automatic
from cs_proto.arrays import dtype_name
from cs_proto.errors import CheckpointDamagedError, CheckpointError
from cs_proto.frozen import frozen
from cs_proto.sizes import in_units

from .disk import SUFFIX, newest_in, room, write_at

__all__ = ["SUFFIX", "Readable", "Stored", "add", "reading", "replace"]

_log = logging.getLogger("central_storage.checkpoint_files")

# Goes up when a file changes in a way that an older reader cannot read. Format 1 has neither checksums nor a name.
_FORMAT = 2
_INDEX = "central_storage"
_CHECKSUM = "central_storage_crc32"
#: How the header of a file of format 2 begins. The eight digits of its checksum come next.
_START = f'{{"__metadata__": {{"{_CHECKSUM}": "'.encode()
_NO_CHECKSUM = "0" * 8
#: Readers of safetensors refuse a longer header. Bytes.
_LONGEST_HEADER = 100_000_000
#: Bytes by which a header may grow after its length is fixed, when the number in the name gets more digits.
_ROOM = 32
_PAIRS = {"complex64": "F32", "complex128": "F64"}  # safetensors has no dtype for a complex128
_DTYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign[:1].upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
_NAMES = {stored: name for name, stored in _DTYPES.items()}
_DRAFT = re.compile(rf".+{re.escape(SUFFIX)}\.[0-9a-f]{{16}}\.draft")
_NUMBERED = re.compile(rf".*-\d+{re.escape(SUFFIX)}", re.DOTALL)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # a bool is not a count


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


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


class Readable(Protocol):
    """An array to write: ``read`` returns a value that converts to an array of this dtype and shape."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def read(self) -> Callable[[], Any]: ...


# --- writing ------------------------------------------------------------------------------------------------------


def replace(path: str, arrays: Mapping[str, Readable], index: Mapping[str, Any]) -> None:
    """Write ``arrays``, and ``index`` with the fields of every file, to ``path``, atomically. An existing file is
    replaced; if ``path`` is a symbolic link, the link is replaced, and its target stays.

    Memory is needed for one array at a time. Raises OSError if the file system refuses, with the path and the bytes
    that were needed and are free, and CheckpointError for more arrays than a file can have. An existing file stays
    then.
    """
    with _drafted(path, arrays, index) as draft:
        draft.seal(path, index)
        with draft.explained():
            os.replace(draft.name, path)
            _sync_directory(draft.directory)  # otherwise a power failure may lose the name


def add(
    path_of: Callable[[int], str],
    next_number: Callable[[], int],
    arrays: Mapping[str, Readable],
    index: Mapping[str, Any],
) -> tuple[str, int]:
    """As :func:`replace`, but never replaces a file, even if other processes write there.

    When the file is written, it takes the path of the next number. ``next_number`` returns one more than the numbers
    that exist; all paths lie in one directory. The index gets the number as its ``save_counter``.

    Returns the path and its number.
    """
    number = next_number()
    with _drafted(path_of(number), arrays, {**index, "save_counter": number}) as draft:
        while True:
            path = path_of(number)
            draft.seal(path, {**index, "save_counter": number})
            with draft.explained():
                if _take(path, draft.name, number, next_number):
                    _sync_directory(draft.directory)
                    return path, number
            number = next_number()


class _Draft:
    """A file that is being written under a random name in the directory of its path. Its writer holds a lock on it.
    The system releases the lock when the process dies, so others can tell that the file is abandoned."""

    def __init__(self, path: str, arrays: Mapping[str, Readable], index: Mapping[str, Any]) -> None:
        self.directory = os.path.dirname(path) or "."
        self._path = path
        # Wide dtypes first, so that each array is aligned.
        self._arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))
        self._checksums = dict.fromkeys(self._arrays, _NO_CHECKSUM)
        self._places: dict[str, dict[str, Any]] = {}
        end = 0
        for key, array in self._arrays.items():
            begin, end = end, end + math.prod(array.shape) * array.dtype.itemsize
            name = dtype_name(array.dtype)
            shape = [*array.shape, 2] if name in _PAIRS else list(array.shape)
            stored = _PAIRS.get(name) or _DTYPES[name]
            self._places[key] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
        # The checksums are known only after the arrays are written, so the header is written last, and has room to
        # grow.
        self._header_nbytes = -(-(len(self._header(path, index)) + _ROOM) // 8) * 8
        if self._header_nbytes > _LONGEST_HEADER:
            raise CheckpointError(
                f"{path} would need a header of {self._header_nbytes} bytes for its {len(arrays)} arrays, but a header "
                f"has at most {_LONGEST_HEADER} bytes; save the objects in several checkpoints"
            )
        #: The bytes of the arrays.
        self.content_nbytes = end
        self._nbytes = 8 + self._header_nbytes + end
        with self.explained():
            _make_directory(self.directory)
            _remove_abandoned(self.directory)
            self.name, self._file, self._mode = _open_draft(path)

    def write_arrays(self, advance: Callable[[int], None]) -> None:
        """Write the arrays, one after the other. ``advance`` is told of the bytes that are written."""
        offset = 8 + self._header_nbytes
        for key, source in self._arrays.items():
            array = np.ascontiguousarray(source.read(), source.dtype.newbyteorder("<")).reshape(source.shape)
            data = array.reshape(-1).view(np.uint8)
            self._checksums[key] = _checksum(data)
            with self.explained():
                offset = write_at(self._file, data.data, offset, advance)

    def seal(self, path: str, index: Mapping[str, Any]) -> None:
        """Write the header for a file with the final name ``path``, and wait until everything is on the disk."""
        text = self._header(path, index).ljust(self._header_nbytes)
        _, rest = _take_out_checksum(text)
        text = _START + _checksum(rest).encode() + rest[len(_START) :]
        with self.explained():
            write_at(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)
            if stat.S_IMODE(os.fstat(self._file).st_mode) != self._mode:
                os.fchmod(self._file, self._mode)
            os.fsync(self._file)

    def close(self) -> None:
        """Remove the file under its random name, if it still exists."""
        with contextlib.suppress(OSError):  # the next save in this directory removes it
            os.unlink(self.name)
        os.close(self._file)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise an OSError of the file system with the path, the bytes needed and free, and the remedy."""
        try:
            yield
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "save to another directory")
            need = f"the checkpoint needs {self._nbytes} bytes{in_units(self._nbytes)}"
            raise OSError(
                error.errno, f"{error.strerror}; {need}, {room(self.directory)}; {remedy}", self._path
            ) from error

    def _header(self, path: str, index: Mapping[str, Any]) -> bytes:
        complex_ = {key: array.dtype.name for key, array in self._arrays.items() if array.dtype.kind == "c"}
        own = {"format": _FORMAT, "name": os.path.basename(path), "complex": complex_, "checksums": self._checksums}
        metadata = {_CHECKSUM: _NO_CHECKSUM, _INDEX: json.dumps({**own, **index})}
        return json.dumps({"__metadata__": metadata, **self._places}).encode()


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or save to another file system"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "save to a directory that this user may write to"),
}


@contextlib.contextmanager
def _drafted(path: str, arrays: Mapping[str, Readable], index: Mapping[str, Any]) -> Iterator[_Draft]:
    """A draft with all arrays in it. It is removed at the end, also after Ctrl-C."""
    draft = _Draft(path, arrays, index)
    try:
        with automatic(f"saving {os.path.basename(path)}", draft.content_nbytes, "B") as advance:
            draft.write_arrays(advance)
        yield draft
    finally:
        draft.close()


def _open_draft(path: str) -> tuple[str, int, int]:
    """A new locked file in the directory of ``path``: its name, its descriptor, and its final mode, which follows from
    the umask as for every file. Until then only this user can open it."""
    while True:
        name = f"{path}.{secrets.token_hex(8)}.draft"
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        mode = stat.S_IMODE(os.fstat(file).st_mode)
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(file, 0o600)
        if _lock(file):
            return name, file, mode
        os.close(file)


def _lock(file: int) -> bool:
    """Lock a new draft. False if another process has taken it for abandoned meanwhile."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where no process removes drafts
        return True
    return os.fstat(file).st_nlink > 0


def _remove_abandoned(directory: str) -> None:
    """Remove the drafts of processes that have died."""
    with os.scandir(directory) as entries:
        drafts = [entry for entry in entries if _DRAFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
    for entry in drafts:
        with contextlib.suppress(OSError):  # its writer is alive, or has finished it, or it belongs to another user
            file = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
                _log.info("removed %s, left behind by a process that was killed", entry.path)
            finally:
                os.close(file)


def _take(path: str, draft: str, number: int, next_number: Callable[[], int]) -> bool:
    """Give the file ``draft`` the name ``path``. False if the name is taken, or was: others may have saved and deleted
    a file with that name since its number was found, and then this would not be the newest one."""
    has_links = True
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        has_links = False
    if not has_links:  # an empty file takes the name first; it stays behind if the process is killed right here
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
    is_ours = False
    try:
        if next_number() <= number + 1:
            if not has_links:
                os.replace(draft, path)
            is_ours = True
    finally:
        if not is_ours:
            with contextlib.suppress(FileNotFoundError):  # another manager has deleted it
                os.unlink(path)
    return is_ours


def _make_directory(directory: str) -> None:
    missing = []
    while directory not in ("/", ".") and not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory) or "."
    for made in reversed(missing):
        try:
            os.mkdir(made)
        except FileExistsError:  # another process was faster, or it is a file
            if not os.path.isdir(made):
                raise
        _sync_directory(os.path.dirname(made) or ".")


def _sync_directory(directory: str) -> None:
    """Wait until the names in ``directory`` are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- checksums ----------------------------------------------------------------------------------------------------


def _checksum(data: Any) -> str:
    """The CRC-32 of bytes, as eight digits."""
    return f"{zlib.crc32(data):08x}"


def _require_checksum(path: str, what: str, data: Any, expected: str) -> None:
    """Raise CheckpointDamagedError if the checksum of ``data`` is not ``expected``."""
    if (found := _checksum(data)) != expected:
        raise _damaged(path, f"the checksum of {what} is {found}, but was {expected} when it was saved")


def _take_out_checksum(header: bytes) -> tuple[str, bytes]:
    """The checksum at the beginning of a header of format 2, and the rest, to which it belongs."""
    end = len(_START) + len(_NO_CHECKSUM)
    return header[len(_START) : end].decode(errors="replace"), _START + header[end:]


def _damaged(path: str, what: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"{path} is damaged: {what}; restore another checkpoint, or an intact copy of this one"
    )


# --- reading ------------------------------------------------------------------------------------------------------


@frozen
class _Place:
    """The place of an array in the file, with its dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Stored:
    """An open checkpoint with a valid header and index. ``index`` has the fields of ``_FIELDS``."""

    def __init__(
        self,
        path: str,
        file: int,
        index: Mapping[str, Any],
        places: Mapping[str, _Place],
        advance: Callable[[int], None],
    ) -> None:
        """``advance`` is told of the bytes that are read."""
        self._path = path
        self._file = file
        self._places = places
        self._advance = advance
        self.index = index
        self.keys: frozenset[str] = frozenset(places)

    def fault(self, key: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str | None:
        """The error text if the array ``key`` has another dtype or shape, else None."""
        place = self._places[key]
        if (place.dtype, place.shape) == (dtype_name(dtype), shape):
            return None
        return f"{key} is {place.dtype}{list(place.shape)} in the checkpoint, but {dtype}{list(shape)} here"

    def verify(self) -> None:
        """Read and check every array. Raises CheckpointDamagedError if one has changed since it was saved."""
        for key in self._places:
            self._bytes(key)

    def array(self, key: str) -> np.ndarray:
        """The array ``key``. The returned bytes themselves have been checked. Raises as :meth:`verify`."""
        place = self._places[key]
        stored = np.dtype(place.dtype).newbyteorder("<")
        return self._bytes(key).view(stored).reshape(place.shape).astype(place.dtype, copy=False)

    def _bytes(self, key: str) -> np.ndarray:
        place = self._places[key]
        data = np.empty(place.nbytes, np.uint8)
        _read_at(self._path, self._file, data.data, place.offset)
        self._advance(place.nbytes)
        if "checksums" in self.index:
            _require_checksum(self._path, key, data, self.index["checksums"][key])
        return data


@contextlib.contextmanager
def reading(path: str) -> Iterator[Stored]:
    """Open a checkpoint and check its header and index. The same open file is read until the end, whatever ``path``
    names meanwhile.

    Raises CheckpointError if there is none or this version does not read its format, CheckpointDamagedError if it is
    damaged or renamed, OSError if the file system refuses.
    """
    file = _open(path)
    try:
        size = os.fstat(file).st_size
        header = _header_of(path, file, size)
        index, places = _parsed(path, header, 8 + len(header), size)
        twice = 2 * sum(place.nbytes for place in places.values())  # to check all, and to set all
        with automatic(f"restoring {os.path.basename(path)}", twice, "B") as advance:
            yield Stored(path, file, index, places, advance)
    finally:
        os.close(file)


def _open(path: str) -> int:
    try:
        file = os.open(
            path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )  # without O_NONBLOCK a pipe would wait for its writer
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.islink(path):
            raise _damaged(path, "it is a link to a file that does not exist") from error
        hint = newest_in(path.removesuffix(SUFFIX))
        raise CheckpointError(f"there is no checkpoint {path}{hint}") from error
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}; make it readable, or restore another checkpoint", path
        ) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _damaged(path, "it is not a regular file")
    return file


def _read_at(path: str, file: int, into: memoryview, offset: int) -> None:
    """Fill ``into`` from the file."""
    while into:
        try:
            count = os.preadv(file, [into], offset)
        except OSError as error:
            raise _damaged(path, f"it cannot be read from the disk ({error.strerror})") from error
        if not count:
            raise _damaged(path, f"it ends at byte {offset}, and {len(into)} bytes are missing")
        into, offset = into[count:], offset + count


def _header_of(path: str, file: int, size: int) -> bytes:
    """The header, checked if it has a checksum."""
    word = bytearray(8)
    _read_at(path, file, memoryview(word), 0)
    nbytes = int.from_bytes(word, "little")
    most = min(size - 8, _LONGEST_HEADER)
    if nbytes > most:
        raise _damaged(path, f"its header claims {nbytes} bytes, but at most {most} are possible")
    header = bytearray(nbytes)
    _read_at(path, file, memoryview(header), 8)
    if header.startswith(_START):
        checksum, rest = _take_out_checksum(bytes(header))
        _require_checksum(path, "its header", rest, checksum)
    return bytes(header)


def _parsed(path: str, header: bytes, begin: int, end: int) -> tuple[dict[str, Any], dict[str, _Place]]:
    """The index, and the places of the arrays, which fill the file from ``begin`` to ``end``."""
    entries = _object(path, "its header", header)
    metadata = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_INDEX), str):
        raise _damaged(path, "it is a safetensors file, but not a checkpoint of central-storage")
    index = _object(path, "its index", metadata[_INDEX])
    number = index.get("format")
    if not _is_count(number):
        raise _damaged(path, f"the format in its index is {number!r:.80}, which is not a whole number")
    is_sealed = header.startswith(_START)
    if number not in (1, _FORMAT):
        raise CheckpointError(
            f"{path} has format {number!r:.80}, but this version reads formats 1 to {_FORMAT}; use the version of "
            "central-storage that saved it"
        )
    if is_sealed != (number == _FORMAT):
        raise _damaged(path, f"its index has format {number}, but its header belongs to another format")
    _check_index(path, index)
    name = os.path.basename(path)
    if is_sealed and _NUMBERED.fullmatch(name) and name != index["name"]:
        raise CheckpointDamagedError(
            f"{path} was saved as {index['name']}, so it is another checkpoint; rename it to that, or to a name that "
            "does not end in a number"
        )
    places = {key: _place(path, key, entry, index["complex"].get(key)) for key, entry in entries.items()}
    at = 0
    for key, place in sorted(places.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if place.offset != at:
            raise _damaged(path, f"{key} begins at byte {place.offset} of the arrays, but must begin at {at}")
        at += place.nbytes
    if at != end - begin:
        raise _damaged(path, f"its arrays take {at} bytes, but the file has {end - begin} for them")
    _check_names(path, index, places)
    return index, {
        key: _Place(place.dtype, place.shape, begin + place.offset, place.nbytes) for key, place in places.items()
    }


def _object(path: str, what: str, text: bytes | str) -> dict[str, Any]:
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


def _place(path: str, key: str, entry: Any, complex_: str | None) -> _Place:
    """The place of an array according to ``entry`` of the header, counted from the beginning of the arrays."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(name) for name in ("dtype", "shape", "data_offsets"))
    if not (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and all(map(_is_count, shape))
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(map(_is_count, offsets))
        and offsets[0] <= offsets[1]
    ):
        raise _damaged(path, f"its header does not give the dtype, shape and place of {key}")
    name = _NAMES.get(dtype, dtype)
    nbytes = offsets[1] - offsets[0]
    if dtype in _NAMES and math.prod(shape) * np.dtype(name).itemsize != nbytes:
        raise _damaged(path, f"{key} has {nbytes} bytes, which does not match {name}{shape}")
    if complex_ is not None:
        if _PAIRS.get(complex_) != dtype or shape[-1:] != [2]:
            raise _damaged(path, f"{key} is {name}{shape} in its header, but {complex_:.80} in its index")
        name, shape = complex_, shape[:-1]
    return _Place(name, tuple(shape), offsets[0], nbytes)


def _check_names(path: str, index: Mapping[str, Any], places: Mapping[str, _Place]) -> None:
    """Check that the index names the arrays of the file."""
    named = {*index["complex"], *index["also"].values(), *index.get("checksums", ())}
    if more := named - places.keys():
        raise _damaged(path, f"its index names {min(more)}, but it does not hold that array")
    if "checksums" in index and (less := places.keys() - index["checksums"].keys()):
        raise _damaged(path, f"its index has no checksum for {min(less)}")
