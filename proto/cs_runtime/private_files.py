"""Files for their owner only, in directories that may be anybody's.

A pipe or a device in the place of a file is an error: a pipe would wait for its other end, and a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TextIO

__all__ = ["open_private", "read_file"]

# Nothing that is read here is longer. Bytes.
_MOST = 16 << 20


def open_private(path: str, mode: str) -> TextIO:
    """Open a text file with mode 0600, whatever the umask: ``x`` makes a new one, ``a`` appends, also to one that is
    there. No link is followed. Raises OSError, also for what is no regular file, and PermissionError if the file
    belongs to another user.

    Example::

        with open_private("/tmp/error.json.12", "x") as file:
            file.write("{}")
    """
    how = {"x": os.O_EXCL, "a": os.O_APPEND}[mode]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(1, "it belongs to another user", path)
        _require_regular(descriptor, path)
        os.fchmod(descriptor, 0o600)
        return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")
    except OSError:
        os.close(descriptor)
        raise


def read_file(path: str) -> bytes:
    """The content of a file. Raises OSError, also for what is no regular file and for one of more than 16 MiB."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(descriptor, path)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(_MOST + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MOST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return content


def _require_regular(file: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", path)
