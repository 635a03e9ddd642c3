"""How a checkpoint is written: a draft under a random name, synced, then renamed or linked to its own name.

A file is there as a whole or not at all, whenever the process is killed or the power is cut.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import secrets
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from central_storage.core.backends import ReadRows, Value
from central_storage.diagnostics.bars import automatic
from cs_proto.errors import CheckpointError, CheckpointSaveError
from cs_proto.sizes import in_units
from cs_runtime import saving_mark
from cs_runtime.failpoints import failpoint

from . import disk
from .file_format import (
    LONGEST_HEADER,
    METADATA,
    NO_CHECKSUM,
    Names,
    checksums_of,
    header_of_format_2,
    places_of,
    sealed,
)

__all__ = ["Block", "add", "explained", "next_of", "open_draft", "replace"]

_log = logging.getLogger("central_storage.checkpoint_files")

#: Bytes by which a header may grow after its length is fixed, when the number in the name gets more digits.
_ROOM = 32
_IS_LITTLE = sys.byteorder == "little"
# Of a checkpoint or an export.
_DRAFT = re.compile(r".+\.(safetensors|npz|pt)\.[0-9a-f]{16}\.draft")


class Block(NamedTuple):
    """Arrays of one dtype to write, which follow each other in the file. There may be thousands, so they are no objects
    of their own."""

    dtype: np.dtype[Any]
    keys: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    #: The bytes of each array in the machine's order, or what returns them or a value that converts to such an array.
    values: Sequence[Value]
    #: Of one array: returns the rows from one number to below another, so that a large array need not be in memory as a
    #: whole.
    read_rows: ReadRows | None = None

    def nbytes(self) -> int:
        """The bytes of all."""
        return self.dtype.itemsize * sum(math.prod(shape) * count for shape, count in Counter(self.shapes).items())


def replace(path: str, blocks: Sequence[Block], index: Mapping[str, Any]) -> None:
    """Write arrays, and ``index`` with the fields of every file, to ``path``, atomically. An existing file is
    replaced; if ``path`` is a symbolic link, the link is replaced, and its target stays.

    Memory is needed for one array at a time, or for a piece of it if it has ``read_rows``. Raises CheckpointSaveError
    (an OSError) if the file system refuses, with the path and the bytes that were needed and are free, and
    CheckpointError for more arrays than a file can have. An existing file stays then.
    """
    with _drafted(path, blocks, index) as draft:
        draft.seal(path, index)
        with draft.explained():
            failpoint("save.replace")
            disk.replace(draft.name, path)
            disk.sync_directory(draft.directory)  # otherwise a power failure may lose the name


def add(
    path_of: Callable[[int], str],
    next_number: Callable[[], int],
    blocks: Sequence[Block],
    index: Mapping[str, Any],
) -> tuple[str, int]:
    """As :func:`replace`, but never replaces a file, even if other processes write there.

    When the file is written, it takes the path of the next number. ``next_number`` returns one more than the numbers
    that exist; all paths lie in one directory. The index gets the number as its ``save_counter``.

    Returns the path and its number.
    """
    number = next_of(path_of, next_number, blocks)
    with _drafted(path_of(number), blocks, {**index, "save_counter": number}) as draft:
        while True:
            path = path_of(number)
            draft.seal(path, {**index, "save_counter": number})
            with draft.explained():
                failpoint("save.take")
                if _take(path, draft.name, number, next_number):
                    failpoint("save.taken")
                    disk.sync_directory(draft.directory)
                    failpoint("save.saved")
                    return path, number
                number = next_number()


def next_of(path_of: Callable[[int], str], next_number: Callable[[], int], blocks: Iterable[Block]) -> int:
    """The next number of a checkpoint, as for :func:`add`.

    Raises CheckpointSaveError if the directory cannot be read.
    """
    directory = os.path.dirname(path_of(0)) or "."
    with explained(directory, directory, sum(block.nbytes() for block in blocks)):
        return next_number()


class _Draft:
    """A file that is being written under a random name in the directory of its path. Its writer holds a lock on it.
    The system releases the lock when the process dies, so others can tell that the file is abandoned."""

    def __init__(self, path: str, blocks: Sequence[Block], index: Mapping[str, Any]) -> None:
        if any(METADATA in block.keys for block in blocks):
            raise CheckpointError(
                f"{path} cannot hold an object of the name {METADATA}, which has another meaning in the header of a "
                "safetensors file; give the object another name"
            )
        self.directory = os.path.dirname(path) or "."
        self._path = path
        # Wide dtypes first, so that each array is aligned.
        self._blocks = sorted(blocks, key=lambda block: -block.dtype.itemsize)
        keys = [key for block in self._blocks for key in block.keys]
        self._names = Names(keys)
        self._checksums = [NO_CHECKSUM] * len(keys)
        #: The bytes of the arrays.
        self._places, self.content_nbytes = places_of(self._blocks)
        # The checksums are known only after the arrays are written, so the header is written last, and has room to
        # grow.
        self._header_nbytes = -(-(len(self._header(path, index)) + _ROOM) // 8) * 8
        if self._header_nbytes > LONGEST_HEADER:
            raise CheckpointError(
                f"{path} would need a header of {self._header_nbytes} bytes for its {len(keys)} arrays, but a header "
                f"has at most {LONGEST_HEADER} bytes; save the objects in several checkpoints"
            )
        self._nbytes = 8 + self._header_nbytes + self.content_nbytes
        with explained(path, self.directory, self._nbytes):
            self.name, self._file, self._mode = open_draft(path)

    def write_arrays(self, advance: Callable[[int], None]) -> None:
        """Write the arrays, one after the other. ``advance`` is told of the bytes that are written."""
        offset, small, held = 8 + self._header_nbytes, list[memoryview](), 0
        limit, crc32, checksums = disk.small_nbytes(), zlib.crc32, list[int]()
        for block in self._blocks:
            for value in block.values:
                found = 0
                for data in (value,) if _IS_LITTLE and type(value) is memoryview else _in_pieces(block, value):
                    found, nbytes = crc32(data, found), len(data)
                    if held + nbytes > disk.PART or nbytes > limit:
                        offset = self._write(b"".join(small), offset, advance)
                        small, held = [], 0
                    if nbytes <= limit:
                        small.append(data)
                        held += nbytes
                    else:
                        offset = self._write(data, offset, advance)
                checksums.append(found)
        self._checksums = checksums_of(checksums)
        self._write(b"".join(small), offset, advance)

    def _write(self, data: bytes | memoryview, offset: int, advance: Callable[[int], None]) -> int:
        with self.explained():
            return disk.write_at(self._file, memoryview(data), offset, advance)

    def seal(self, path: str, index: Mapping[str, Any]) -> None:
        """Write the header for a file with the final name ``path``, and wait until everything is on the disk."""
        text = sealed(self._header(path, index).ljust(self._header_nbytes))
        with self.explained():
            disk.write_at(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)
            if disk.mode_of(self._file) != self._mode:
                disk.set_mode(self._file, self._mode)
            failpoint("save.sync")
            disk.sync(self._file)

    def close(self) -> None:
        """Remove the file under its random name, if it still exists."""
        with contextlib.suppress(OSError):  # the next save in this directory removes it
            disk.remove(self.name)
        disk.close(self._file)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """As :func:`explained`, for this file."""
        return explained(self._path, self.directory, self._nbytes, self._file)

    def _header(self, path: str, index: Mapping[str, Any]) -> bytes:
        wide = [block for block in self._blocks if block.dtype.kind == "c"]
        complex_ = {key: block.dtype.name for block in wide for key in block.keys}
        own = {"name": os.path.basename(path), "complex": complex_}
        return header_of_format_2(own, self._names.with_checksums(self._checksums), index, self._places)


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or save to another file system"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "save to a directory that this user may write to"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "close files, or raise the limit (ulimit -n)"),
    errno.EFBIG: "raise the limit (ulimit -f), or save to another file system",
    errno.EIO: "check the disk, and save to another one",
}


@contextlib.contextmanager
def explained(path: str, directory: str, needed: int, draft: int | None = None) -> Iterator[None]:
    """Raise an OSError of the file system as a CheckpointSaveError with the path, the bytes needed and free, and the
    remedy. What the open file ``draft`` takes counts as free, because it is removed next."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "save to another directory")
        free = disk.free_nbytes(directory)
        if free is not None and draft is not None:
            free += disk.taken_nbytes(draft)
        need = f"the checkpoint needs {needed} bytes{in_units(needed)}"
        text = f"{error.strerror}; {need}, {disk.room(free)}; {remedy}"
        raise CheckpointSaveError(error.errno, text, path, needed_nbytes=needed, free_nbytes=free) from error


def _in_pieces(block: Block, value: Value) -> Iterator[memoryview]:
    """The bytes of an array in the order of the file: as a whole, or in pieces of whole rows if it is large."""
    if block.read_rows is None or block.nbytes() <= disk.PART:
        yield _little_endian(value() if callable(value) else value, block.dtype)
        return
    count = block.shapes[0][0]
    step = max(1, disk.PART * count // block.nbytes())
    for begin in range(0, count, step):
        yield _little_endian(block.read_rows(begin, min(begin + step, count)), block.dtype)


def _little_endian(values: Any, dtype: np.dtype[Any]) -> memoryview:
    """The bytes of a value that was read, in the order of the file."""
    if type(values) is memoryview:  # bytes in the machine's order
        if _IS_LITTLE:
            return values
        values = np.frombuffer(values, dtype)
    return np.ascontiguousarray(values, dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def _drafted(path: str, blocks: Sequence[Block], index: Mapping[str, Any]) -> Iterator[_Draft]:
    """A draft with all arrays in it. It is removed at the end, also after Ctrl-C. Meanwhile ``cs-launch`` knows that
    the script saves."""
    with saving_mark.setting():
        draft = _Draft(path, blocks, index)
        try:
            failpoint("save.draft")
            with automatic(f"saving {os.path.basename(path)}", draft.content_nbytes, "B") as advance:
                draft.write_arrays(advance)
            yield draft
        finally:
            draft.close()


def open_draft(path: str) -> tuple[str, int, int]:
    """A new locked file in the directory of ``path``, which is made if need be, under a name that nobody can guess: its
    name, its descriptor, and its final mode, which follows from the umask as for every file. Until then only this user
    can open it. Drafts of processes that have died are removed from the directory."""
    directory = os.path.dirname(path) or "."
    disk.make_directory(directory)
    _remove_abandoned(directory)
    while True:
        name = f"{path}.{secrets.token_hex(8)}.draft"
        file = disk.create(name)
        try:
            mode = disk.mode_of(file)
            with contextlib.suppress(OSError):  # a file system without modes
                disk.set_mode(file, 0o600)
            if _lock(file):
                return name, file, mode
        except BaseException:  # also Ctrl-C: no draft and no descriptor is left, and the error goes on
            with contextlib.suppress(OSError):
                disk.remove(name)
            disk.close(file)
            raise
        disk.close(file)


def _lock(file: int) -> bool:
    """Lock a new draft. False if another process has taken it for abandoned meanwhile."""
    is_locked = disk.lock(file)
    # On a file system without locks, no process removes drafts.
    return is_locked is None or (is_locked and not disk.is_removed(file))


def _remove_abandoned(directory: str) -> None:
    """Remove the drafts of processes that have died."""
    for name in disk.names(directory):
        if _DRAFT.fullmatch(name):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):  # its writer has finished it, or it belongs to another user
                file = disk.open_to_remove(path)
                try:
                    if disk.lock(file) and disk.size_of(file) is not None:
                        disk.remove(path)
                        _log.info("removed %s, left behind by a process that was killed", path)
                finally:
                    disk.close(file)


def _take(path: str, draft: str, number: int, next_number: Callable[[], int]) -> bool:
    """Give the file ``draft`` the name ``path``. False if the name is taken, or was: others may have saved and deleted
    a file with that name since its number was found, and then this would not be the newest one."""
    try:
        has_links = disk.link(draft, path)
        if not has_links:  # an empty file takes the name first; it stays behind if the process is killed right here
            disk.create_empty(path)
    except FileExistsError:
        return False
    is_ours = False
    try:
        if next_number() <= number + 1:
            if not has_links:
                disk.replace(draft, path)
            is_ours = True
    finally:
        if not is_ours:
            with contextlib.suppress(FileNotFoundError):  # another manager has deleted it
                disk.remove(path)
    return is_ours
