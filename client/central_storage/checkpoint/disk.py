"""The file layer: every operation on files of checkpoints is a function here, and each is one call of the system.

So tests can put a simulated or a failing disk in its place, and can cut the power between any two operations.
``writing`` and ``stored`` know the order in which operations are safe.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from cs_proto.errors import InvalidArgumentError
from cs_proto.sizes import in_units
from cs_runtime.failpoints import failpoint

__all__ = [
    "PART",
    "SMALL",
    "SUFFIX",
    "anchored",
    "changed_at",
    "close",
    "create",
    "create_empty",
    "forget_cached",
    "free_nbytes",
    "is_removed",
    "link",
    "lock",
    "make_directory",
    "mode_of",
    "names",
    "newest_in",
    "open_to_read",
    "open_to_remove",
    "path_of",
    "read_at",
    "remove",
    "replace",
    "room",
    "set_mode",
    "size_of",
    "small_nbytes",
    "stream_of",
    "sync",
    "sync_directory",
    "taken_nbytes",
    "write_at",
]

SUFFIX = ".safetensors"

#: Bytes that are written or read at a time.
PART = 16 << 20
#: As :func:`small_nbytes`, which is never more than a part.
SMALL = 1 << 20

_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# --- open files ---------------------------------------------------------------------------------------------------


def create(path: str) -> int:
    """Make a new file and open it. Raises FileExistsError if the name is taken, even by a link."""
    return os.open(path, os.O_RDWR | _NEW, 0o666)


def create_empty(path: str) -> None:
    """Make a new empty file that only this user can open. Raises as :func:`create`."""
    os.close(os.open(path, os.O_WRONLY | _NEW, 0o600))


def open_to_read(path: str) -> int:
    """Open a file for reading. Without O_NONBLOCK, a pipe would wait for its writer."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def stream_of(file: int) -> BinaryIO:
    """An open file for a library that reads from a file object. It stays open when that is closed."""
    return open(file, "rb", closefd=False)


def open_to_remove(path: str) -> int:
    """Open a file to lock it before it is removed. Raises OSError for a link."""
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def close(file: int) -> None:
    """Close a file. What has not reached the disk is told by :func:`sync`, so an error here says nothing more."""
    with contextlib.suppress(OSError):
        os.close(file)


def lock(file: int) -> bool | None:
    """Lock a file until it is closed or the process dies. False if another process has it; None on a file system
    without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_removed(file: int) -> bool:
    """Whether an open file has no name any more."""
    return os.fstat(file).st_nlink == 0


def write_at(file: int, data: memoryview, offset: int, advance: Callable[[int], None] = lambda count: None) -> int:
    """Write all of ``data``; returns the offset of its end. ``advance`` is told of each part."""
    while data:
        failpoint("save.write")
        count = os.pwrite(file, data[:PART], offset)
        data, offset = data[count:], offset + count
        advance(count)
    return offset


def read_at(file: int, into: memoryview, offset: int) -> int:
    """Read bytes into the beginning of ``into``; returns their number, which is 0 at the end of the file."""
    return os.preadv(file, [into], offset)


def forget_cached(file: int) -> None:
    """Have the next reads of a synced file come from the disk, if the system can do so."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def sync(file: int) -> None:
    """Wait until the content of a file is on the disk."""
    os.fsync(file)


def mode_of(file: int) -> int:
    """The permissions of an open file."""
    return stat.S_IMODE(os.fstat(file).st_mode)


def set_mode(file: int, mode: int) -> None:
    """Set the permissions of an open file."""
    os.fchmod(file, mode)


def size_of(file: int) -> int | None:
    """The size of an open file in bytes; None if it is not a regular file."""
    found = os.fstat(file)
    return found.st_size if stat.S_ISREG(found.st_mode) else None


# --- names --------------------------------------------------------------------------------------------------------


def names(directory: str) -> list[str]:
    """The names in a directory; none if it does not exist."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def path_of(what: str, path: str | os.PathLike[str]) -> str:
    """The text of a path. Raises InvalidArgumentError, in which it is called ``what``, for what no file can have as a
    path."""
    try:
        text = os.fspath(path)
        is_path = isinstance(text, str) and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        is_path = False
    if not is_path:
        raise InvalidArgumentError(
            f"{what} must be a path, a str or Path without NUL and surrogate characters, not {path!r:.80}"
        )
    return text


def anchored(path: str) -> str:
    """The same path, whatever the working directory will be. ``..`` stays, since what is before it may be a link.
    Raises InvalidArgumentError if the working directory is gone."""
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except FileNotFoundError as error:
        raise InvalidArgumentError(
            f"{path} is relative, and the working directory is gone; name an absolute path"
        ) from error


def changed_at(path: str | Path) -> float:
    """The time of the last change of a file, in seconds; of one that is gone, or a link to nothing, 0."""
    try:
        return os.stat(path).st_mtime
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return 0.0


def link(path: str, name: str) -> bool:
    """Give a file a second name. Raises FileExistsError if it is taken. False on a file system without hard links."""
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True


def replace(path: str, name: str) -> None:
    """Rename a file. A file of the new name is replaced, and a link, whose target stays."""
    os.replace(path, name)


def remove(path: str) -> None:
    """Remove a name. Raises FileNotFoundError if there is none."""
    os.unlink(path)


def make_directory(directory: str) -> None:
    """Make a directory and those above it that are missing, and wait until their names are on the disk."""
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
        sync_directory(os.path.dirname(made) or ".")


def sync_directory(directory: str) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        close(descriptor)


# --- what messages say --------------------------------------------------------------------------------------------


def free_nbytes(directory: str) -> int | None:
    """The bytes that are free for this user in the file system of ``directory``, which may not exist yet; None if the
    system does not say."""
    while directory not in ("/", ".") and not os.path.isdir(directory):
        directory = os.path.dirname(directory) or "."
    with contextlib.suppress(OSError):
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize
    return None


def taken_nbytes(file: int) -> int:
    """The bytes of the disk that an open file takes; 0 if the system does not say."""
    with contextlib.suppress(OSError):
        return os.fstat(file).st_blocks * 512
    return 0


def room(free: int | None) -> str:
    """The number of :func:`free_nbytes` in words."""
    return "the free space is unknown" if free is None else f"{free}{in_units(free)} are free"


def small_nbytes() -> int:
    """Arrays up to this size are written together, and read together where they follow each other."""
    return min(SMALL, PART)


def newest_in(directory: str) -> str:
    """A hint for a user who passes a directory instead of a file."""
    if not os.path.isdir(directory):
        return ""
    newest = max(Path(directory).glob(f"*{SUFFIX}"), key=changed_at, default="none")
    return f"; {directory} is a directory, but restore takes a file; the newest one in it is {newest}"
