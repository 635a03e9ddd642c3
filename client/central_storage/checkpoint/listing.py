"""What is in a file of a checkpoint, and which of its arrays are valid, without the objects that were saved."""

from __future__ import annotations

import os

from cs_proto.errors import CheckpointDamagedError, CheckpointError
from cs_proto.frozen import frozen

from . import disk
from .disk import SUFFIX
from .stored import reading

__all__ = ["Contents", "Listed", "contents", "files_of"]


@frozen
class Listed:
    """An array of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    #: Other names of the same array.
    also: tuple[str, ...]
    #: What is wrong with it, or None.
    damage: str | None


@frozen
class Contents:
    """A file of a checkpoint. If its header is damaged, nothing else is known of it."""

    path: str
    #: The bytes of the file; None if it cannot be opened.
    nbytes: int | None
    #: The number of the format.
    format: int | None
    #: The name under which it was saved; format 1 has none.
    name: str | None
    save_counter: int | None
    #: Whether the file has checksums, without which a changed byte is not noticed.
    has_checksums: bool
    arrays: tuple[Listed, ...]
    #: What is wrong with the file or with the first of its damaged arrays, or None.
    damage: str | None


def files_of(path: str) -> list[str]:
    """The checkpoints of a directory, sorted by name and number; of a file the file, whose suffix may be missing.

    Raises CheckpointError if there is no such file, or no checkpoint in the directory, OSError if the file system
    refuses.
    """
    if not os.path.isdir(path):
        found = path if os.path.lexists(path) or path.endswith(SUFFIX) else path + SUFFIX
        if not os.path.lexists(found):
            raise CheckpointError(f"there is no checkpoint {found}")
        return [found]
    names = [name for name in disk.names(path) if name.endswith(SUFFIX)]
    if not names:
        raise CheckpointError(f"there is no checkpoint in {path}: no name in it ends in {SUFFIX}")
    return [os.path.join(path, name) for name in sorted(names, key=_by_number)]


def contents(path: str) -> Contents:
    """Read a file as a whole, with memory for a piece of it, and check every array.

    Raises CheckpointError if its format is newer than this version, OSError if the file system refuses. Damage is no
    error here.
    """
    nbytes = os.stat(path).st_size if os.path.exists(path) else None
    try:
        with reading(path) as stored:
            other: dict[str, list[str]] = {}
            for way, key in stored.index["also"].items():
                other.setdefault(key, []).append(way)
            arrays = []
            for key, (dtype, shape, size) in stored.facts().items():
                damage = None
                try:
                    stored.check(key)
                except CheckpointDamagedError as error:
                    damage = str(error)
                arrays.append(Listed(key, dtype, shape, size, tuple(sorted(other.get(key, ()))), damage))
            index = stored.index
            return Contents(
                path,
                nbytes,
                index["format"],
                index.get("name"),
                index.get("save_counter"),
                "checksums" in index,
                tuple(sorted(arrays, key=lambda array: array.name)),
                next((array.damage for array in arrays if array.damage), None),
            )
    except CheckpointDamagedError as error:
        return Contents(path, nbytes, None, None, None, False, (), str(error))


def _by_number(name: str) -> tuple[str, int, str]:
    begin, _, number = name.removesuffix(SUFFIX).rpartition("-")
    return (begin, int(number), name) if number.isdecimal() and number.isascii() else (name, -1, name)
